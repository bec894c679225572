// Which operations take scratch memory on CUDA, and how much: charged to the device for as long as
// CUDA's kernels hold it.
#include "torch_scratch.h"

#include <ATen/native/ReduceOpsUtils.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "workspaces.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

std::string without_overload(const std::string& name) { return name.substr(0, name.find('.')); }

bool has_elements(c10::ArrayRef<IValue> values) {
  return std::all_of(values.begin(), values.end(), [](const IValue& value) {
    return !value.isTensor() || !value.toTensor().defined() || value.toTensor().numel() > 0;
  });
}

Tensor if_of_device(const IValue& value) {
  return value.isTensor() && is_sim(value.toTensor()) ? value.toTensor() : Tensor();
}

void charge_product(const ScratchRule&, const ScratchCall& call) {
  if (has_elements(call.arguments)) use_blas();
}

// -------------------------------------------------------------------------------------- reductions

int64_t accumulator_bytes(c10::ScalarType type) {
  if (c10::isComplexType(type)) return type == c10::kComplexDouble ? 16 : 8;
  return type == c10::kDouble || c10::isIntegralType(type, /*includeBool=*/true) ? 8 : 4;
}

// The same iterator as CUDA's kernel gets, over tensors without bytes.
Reduction describe(const Tensor& input, const Tensor& result, c10::OptionalIntArrayRef dims,
                   bool keeps_dims) {
  Aliases shapes(/*dry=*/true);
  Tensor output = shapes.of(result);
  at::TensorIterator iterator;
  as_device_work([&] {
    iterator = at::native::make_reduction("reduction", output, shapes.of(input), dims, keeps_dims,
                                          input.scalar_type(), result.scalar_type());
  });
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
  align_to(reinterpret_cast<int64_t>(input.const_data_ptr()) / reduction.element_bytes);
  align_to(iterator.shape()[kept]);
  for (const auto i : c10::irange(strides.size())) {
    if (i != kept) align_to(strides[i] / reduction.element_bytes);
  }
  return reduction;
}

void charge_reduction(const ScratchRule& rule, const ScratchCall& call) {
  const Tensor input = call.argument(0);
  const Tensor result = call.result(0);
  if (!input.defined() || !result.defined() || input.numel() == 0) return;
  std::vector<int64_t> dims;
  const IValue none;
  const IValue& dim = rule.dim < 0 ? none : call.arguments[rule.dim];
  if (dim.isInt()) dims = {dim.toInt()};
  if (dim.isIntList()) dims = dim.toIntVector();
  const bool keeps_dims = rule.keepdim >= 0 && call.arguments[rule.keepdim].toBool();
  const Settings& settings = Machine::get().settings();
  const ReductionScratch scratch =
      scratch_of(describe(input, result, dims, keeps_dims), settings.num_multiprocessors,
                 settings.threads_per_multiprocessor);
  const Held buffer(static_cast<int64_t>(scratch.buffer_bytes));
  const Held semaphores(static_cast<int64_t>(scratch.semaphore_bytes));
}

ChargesByName own_charges() {
  ChargesByName charges;
  // Those that get a cuBLAS handle on CUDA. An addmm may take cublasLt, which shares the workspace.
  for (const char* name :
       {"aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm",
        "aten::addmv", "aten::dot", "aten::vdot", "aten::_int_mm", "aten::_scaled_mm",
        "aten::triangular_solve", "aten::linalg_solve_triangular"}) {
    charges.emplace_back(name, charge_product);
  }
  for (const char* name :
       {"aten::sum", "aten::nansum", "aten::mean", "aten::prod", "aten::linalg_vector_norm"}) {
    charges.emplace_back(name, charge_reduction);
  }
  return charges;
}

std::unordered_map<std::string, ChargeScratch> all_charges() {
  std::unordered_map<std::string, ChargeScratch> all;
  for (const ChargesByName& some :
       {own_charges(), scratch_of_indexing(), scratch_of_norms(), scratch_of_sorts()}) {
    all.insert(some.begin(), some.end());
  }
  return all;
}

}  // namespace

Tensor ScratchCall::argument(size_t index) const { return if_of_device(arguments[index]); }
Tensor ScratchCall::result(size_t index) const { return if_of_device(results[index]); }

int64_t bytes_to_be_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? 0 : static_cast<int64_t>(tensor.nbytes());
}

ScratchRule scratch_rule(const c10::FunctionSchema& schema) {
  static const auto charges = all_charges();
  ScratchRule rule;
  const auto found = charges.find(without_overload(schema.name()));
  if (found != charges.end()) rule.charge = found->second;
  for (const auto i : c10::irange(schema.arguments().size())) {
    if (schema.arguments()[i].name() == "dim") rule.dim = static_cast<int>(i);
    if (schema.arguments()[i].name() == "keepdim") rule.keepdim = static_cast<int>(i);
  }
  return rule;
}

void charge_scratch(const ScratchRule& rule, const ScratchCall& call) {
  if (!Machine::get().settings().workspaces) return;
  const auto& results = call.results;
  const bool has_any = std::any_of(results.begin(), results.end(),
                                   [](const IValue& result) { return has_elements({result}); });
  if (has_any) rule.charge(rule, call);
}

}  // namespace sim
