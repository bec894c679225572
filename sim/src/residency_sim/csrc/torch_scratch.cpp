#include "torch_scratch.h"

#include <ATen/native/ReduceOpsUtils.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <string>
#include <unordered_map>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

std::string without_overload(const std::string& name) { return name.substr(0, name.find('.')); }

bool has_elements(ScratchCall::Values values) {
  return std::all_of(values.begin(), values.end(), [](const IValue& value) {
    return !value.isTensor() || !value.toTensor().defined() || value.toTensor().numel() > 0;
  });
}

int64_t capability_of_card() { return Machine::get().settings().capability; }

bool has_any_elements(ScratchCall::Values results) {
  return std::any_of(results.begin(), results.end(),
                     [](const IValue& result) { return has_elements({result}); });
}

Tensor if_of_device(const IValue& value) {
  return value.isTensor() && is_sim(value.toTensor()) ? value.toTensor() : Tensor();
}

void charge_product(const ScratchCall& call) {
  if (has_elements(call.arguments)) use_blas();
}

// -------------------------------------------------------------------------------------- reductions

int64_t accumulator_bytes(c10::ScalarType type) {
  if (c10::isComplexType(type)) return type == c10::kComplexDouble ? 16 : 8;
  return type == c10::kDouble || c10::isIntegralType(type, /*includeBool=*/true) ? 8 : 4;
}

// The same iterator as CUDA's kernel gets.
Reduction describe(const Tensor& input, Tensor output, c10::OptionalIntArrayRef dims,
                   bool keeps_dims) {
  const at::TensorIterator iterator = at::native::make_reduction(
      "reduction", output, input, dims, keeps_dims, input.scalar_type(), output.scalar_type());
  Reduction reduction;
  reduction.num_dims = iterator.ndim();
  reduction.num_reduced_dims = iterator.num_reduce_dims();
  reduction.num_outputs = iterator.num_output_elements();
  reduction.inputs_per_output = iterator.numel() / reduction.num_outputs;
  reduction.element_bytes = static_cast<int64_t>(input.element_size());
  reduction.accumulator_bytes = accumulator_bytes(input.scalar_type());
  if (input.scalar_type() == c10::kComplexDouble) reduction.max_threads /= 2;
  const auto strides = iterator.strides(iterator.ntensors() - 1);
  if (iterator.ndim() > 0) reduction.fastest_stride_bytes = strides[0];
  const auto kept = static_cast<size_t>(reduction.num_reduced_dims);
  if (kept >= strides.size()) return reduction;
  reduction.fastest_kept_stride_bytes = strides[kept];
  const auto align_to = [&](int64_t number) {
    while (number % reduction.output_alignment) reduction.output_alignment /= 2;
  };
  align_to(input.storage_offset());  // allocations are aligned
  align_to(iterator.shape()[kept]);
  for (const auto i : c10::irange(strides.size())) {
    if (i != kept) align_to(strides[i] / reduction.element_bytes);
  }
  return reduction;
}

void hold_reduction_of(const ScratchCall& call, const Tensor& input) {
  std::vector<int64_t> dims;
  const IValue none;
  const IValue& dim = call.dim < 0 ? none : call.arguments[call.dim];
  if (dim.isInt()) dims = {dim.toInt()};
  if (dim.isIntList()) dims = dim.toIntVector();
  const bool keeps_dims = call.keepdim >= 0 && call.arguments[call.keepdim].toBool();
  hold_reduction(input, call.result(0), dims, keeps_dims);
}

void charge_reduction(const ScratchCall& call) {
  const Tensor input = call.argument(0);
  if (input.defined() && input.numel() > 0) hold_reduction_of(call, call.shape(0));
}

// Of another type than its sum, but for half precision in float32, it is copied to that. Source:
// make_reduction_from_out_ty in ATen/native/ReduceOpsUtils.h.
void charge_sum(const ScratchCall& call) {
  const Tensor input = call.argument(0);
  if (!input.defined() || input.numel() == 0) return;
  const auto type = call.result(0).scalar_type();
  const bool is_read_as_it_is =
      input.scalar_type() == type ||
      (c10::isReducedFloatingType(input.scalar_type()) && type == c10::kFloat);
  const Tensor summed = is_read_as_it_is ? call.shape(0) : call.shape(0).to(type);
  const Held copy = is_read_as_it_is ? Held(0) : hold(summed);
  hold_reduction_of(call, summed);
}

ScratchEntries own_entries() {
  ScratchEntries entries;
  // Those that get a cuBLAS handle on CUDA. An addmm may take cublasLt, which shares the workspace.
  for (const char* name :
       {"aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm",
        "aten::addmv", "aten::dot", "aten::vdot", "aten::_int_mm", "aten::_scaled_mm",
        "aten::triangular_solve", "aten::linalg_solve_triangular"}) {
    entries.push_back(
        {name, charge_product, "ATen/cuda/CublasHandlePool.cpp: getCUDABlasLtWorkspace"});
  }
  const char* of_reduction = "cuda/Reduce.cuh: setReduceConfig";
  for (const char* name : {"aten::sum", "aten::nansum", "aten::mean", "aten::prod"}) {
    entries.push_back({name, charge_sum, of_reduction});
  }
  entries.push_back({"aten::linalg_vector_norm", charge_reduction, of_reduction});
  return entries;
}

using EntriesByName = std::unordered_map<std::string, const ScratchEntry*>;

const EntriesByName& entries_by_name() {
  static const EntriesByName found = [] {
    EntriesByName all;
    for (const ScratchEntry& entry : scratch_table()) all.emplace(entry.operation, &entry);
    return all;
  }();
  return found;
}

}  // namespace

Tensor ScratchCall::argument(size_t index) const { return if_of_device(arguments[index]); }

Tensor ScratchCall::shape(const Tensor& tensor) const {
  return !tensor.defined() || tensor.is_meta() ? tensor : shapes_.of(tensor);
}

Tensor ScratchCall::shape(size_t index) const { return shape(arguments[index].toTensor()); }
Tensor ScratchCall::result(size_t index) const { return shape(results[index].toTensor()); }

const ScratchEntries& scratch_table() {
  static const ScratchEntries table = [] {
    ScratchEntries all;
    for (const ScratchEntries& some :
         {own_entries(), scratch_of_attention(), scratch_of_indexing(), scratch_of_layouts(),
          scratch_of_losses(), scratch_of_norms(), scratch_of_sorts()}) {
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }();
  return table;
}

ScratchRule scratch_rule(const c10::FunctionSchema& schema) {
  ScratchRule rule;
  const auto found = entries_by_name().find(without_overload(schema.name()));
  if (found == entries_by_name().end()) return rule;
  rule.entry = found->second;
  for (const auto i : c10::irange(schema.arguments().size())) {
    const c10::Argument& argument = schema.arguments()[i];
    if (argument.name() == "dim") rule.dim = static_cast<int>(i);
    if (argument.name() == "keepdim") rule.keepdim = static_cast<int>(i);
    rule.is_out |= argument.is_out();
  }
  return rule;
}

void charge_scratch(const ScratchRule& rule, ScratchCall call) {
  call.dim = rule.dim;
  call.keepdim = rule.keepdim;
  const bool is_ordered = rule.entry->results == Results::kByRule && !rule.is_out;
  const bool charges =
      Machine::get().settings().workspaces && (is_ordered || has_any_elements(call.results));
  if (!charges || !is_ordered) call.make_results();
  if (charges) as_device_work([&] { rule.entry->charge(call); });
  call.make_results();
}

void charge_scratch(const char* operation, ScratchCall::Values arguments) {
  if (!Machine::get().settings().workspaces) return;
  const ScratchEntry* entry = entries_by_name().at(operation);
  as_device_work([&] { entry->charge({arguments, {}}); });
}

void keep_storage(const ScratchRule& rule, const ScratchCall& call) {
  const Tensor& result = call.results.back().toTensor();
  const size_t num_bytes = static_cast<size_t>(rule.entry->num_kept(call)) * result.itemsize();
  c10::StorageImpl* storage = result.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < num_bytes) storage->set_nbytes(num_bytes);
}

Held hold(const Tensor& shape) { return Held(static_cast<int64_t>(shape.storage().nbytes())); }

int64_t bytes_to_be_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? 0 : static_cast<int64_t>(tensor.nbytes());
}

Held hold_sort(int64_t num_keys, int64_t num_bits, int64_t key_bytes, int64_t value_bytes) {
  return Held(sort_scratch_bytes(capability_of_card(), num_keys, num_bits, key_bytes, value_bytes));
}
Held hold_scan(int64_t num_items, int64_t item_bytes) {
  return Held(scan_scratch_bytes(capability_of_card(), num_items, item_bytes));
}
Held hold_scan_by_key(int64_t num_items) {
  return Held(scan_by_key_scratch_bytes(capability_of_card(), num_items));
}
Held hold_select(int64_t num_items) {
  return Held(select_scratch_bytes(capability_of_card(), num_items));
}
Held hold_unique_by_key(int64_t num_items, int64_t key_bytes) {
  return Held(unique_by_key_scratch_bytes(capability_of_card(), num_items, key_bytes));
}
Held hold_sum(int64_t num_items) {
  const Settings& settings = Machine::get().settings();
  return Held(sum_scratch_bytes(num_items, settings.num_multiprocessors,
                                settings.threads_per_multiprocessor));
}

Held hold_contiguous(const Tensor& tensor) { return Held(bytes_to_be_contiguous(tensor)); }

void hold_reduction(const Tensor& input, const Tensor& result, c10::OptionalIntArrayRef dims,
                    bool keeps_dims) {
  const Settings& settings = Machine::get().settings();
  const ReductionScratch scratch =
      scratch_of(describe(input, result, dims, keeps_dims), settings.num_multiprocessors,
                 settings.threads_per_multiprocessor);
  const Held buffer(static_cast<int64_t>(scratch.buffer_bytes));
  const Held semaphores(static_cast<int64_t>(scratch.semaphore_bytes));
}

}  // namespace sim
