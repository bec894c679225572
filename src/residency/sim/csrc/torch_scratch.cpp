// Which operations take scratch memory on CUDA, and how much: charged to the device for as long as
// CUDA's kernels hold it.
#include <ATen/ExpandUtils.h>
#include <ATen/native/ReduceOpsUtils.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include <unordered_set>
#include <utility>

#include "torch_scratch.h"
#include "workspaces.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

std::string without_overload(const std::string& name) { return name.substr(0, name.find('.')); }

bool has_elements(const IValue* values, size_t num_values) {
  for (const auto i : c10::irange(num_values)) {
    if (values[i].isTensor() && values[i].toTensor().defined() && !values[i].toTensor().numel()) {
      return false;
    }
  }
  return true;
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

void take_for_a_moment(size_t first_bytes, size_t second_bytes) {
  Machine& machine = Machine::get();
  void* first = machine.allocate(first_bytes);
  void* second = nullptr;
  try {
    second = machine.allocate(second_bytes);
  } catch (...) {
    machine.free(first);
    throw;
  }
  machine.free(second);
  machine.free(first);
}

// -------------------------------------------------------------------------- accumulating index_put

// Device memory of a kernel, for as long as this lives.
class Held {
 public:
  explicit Held(size_t num_bytes) : block_(Machine::get().allocate(num_bytes)) {}
  Held(Held&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  Held& operator=(Held&& other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Held() {
    if (block_) Machine::get().free(block_);
  }

 private:
  void* block_;
};

// Source: index_put_with_sort_kernel and makeLinearIndex in ATen/native/cuda/Indexing.cu. Positions
// of all indices in one, which are sorted with a range; those that come from masks are not known.
void charge_index_put(const IValue* arguments) {
  const Tensor& self = arguments[0].toTensor();
  if (!is_sim(self) || !arguments[3].toBool()) return;
  std::vector<int64_t> shape;
  int64_t num_rows = 1;
  int64_t num_indices = 0;
  int64_t dim = 0;
  for (const IValue& each : arguments[1].toListRef()) {
    if (each.isTensor() && each.toTensor().defined()) {
      const Tensor& index = each.toTensor();
      if (index.scalar_type() == c10::kBool || index.scalar_type() == c10::kByte) return;
      shape = at::infer_size(shape, index.sizes());
      num_rows *= self.size(dim);
      num_indices++;
    }
    dim++;
  }
  if (num_indices == 0) return;
  const int64_t num_positions = c10::multiply_integers(shape);
  const size_t num_bytes = static_cast<size_t>(num_positions) * sizeof(int64_t);
  const auto scaled = [&] {
    const Held wrapped(num_bytes);
    return Held(num_bytes);
  };
  Held positions = scaled();
  for (int64_t i = 1; i < num_indices; i++) {
    const Held more = scaled();
    Held sum(num_bytes);
    positions = std::move(sum);
  }
  const Held sorted(num_bytes);
  const Held original(num_bytes);
  const Held range(num_bytes);
  int64_t num_bits = 1;
  for (int64_t largest = num_rows - 1; largest > 1; largest >>= 1) num_bits++;
  const Held sort(sort_scratch_bytes(num_positions, num_bits));
}

}  // namespace

ScratchRule scratch_rule(const c10::FunctionSchema& schema) {
  // Those that get a cuBLAS handle on CUDA. An addmm may take cublasLt, which shares the workspace.
  static const std::unordered_set<std::string> products{
      "aten::mm",
      "aten::addmm",
      "aten::_addmm_activation",
      "aten::bmm",
      "aten::baddbmm",
      "aten::addmv",
      "aten::dot",
      "aten::vdot",
      "aten::_int_mm",
      "aten::_scaled_mm",
      "aten::triangular_solve",
      "aten::linalg_solve_triangular",
  };
  static const std::unordered_set<std::string> reductions{
      "aten::sum", "aten::nansum", "aten::mean", "aten::prod", "aten::linalg_vector_norm",
  };
  ScratchRule rule;
  const std::string name = without_overload(schema.name());
  if (products.count(name)) rule.kind = ScratchRule::Kind::kProduct;
  if (reductions.count(name)) rule.kind = ScratchRule::Kind::kReduction;
  if (name == "aten::_index_put_impl_") rule.kind = ScratchRule::Kind::kIndexPut;
  for (const auto i : c10::irange(schema.arguments().size())) {
    if (schema.arguments()[i].name() == "dim") rule.dim = static_cast<int>(i);
    if (schema.arguments()[i].name() == "keepdim") rule.keepdim = static_cast<int>(i);
  }
  return rule;
}

void charge_scratch(const ScratchRule& rule, const IValue* arguments, size_t num_arguments,
                    const IValue& result) {
  if (!Machine::get().settings().workspaces) return;
  if (!has_elements(arguments, num_arguments) || !has_elements(&result, 1)) return;
  if (rule.kind == ScratchRule::Kind::kProduct) return use_blas();
  if (rule.kind == ScratchRule::Kind::kIndexPut) return charge_index_put(arguments);
  const Tensor& input = arguments[0].toTensor();
  if (!is_sim(input) || !result.isTensor()) return;
  std::vector<int64_t> dims;
  const IValue none;
  const IValue& dim = rule.dim < 0 ? none : arguments[rule.dim];
  if (dim.isInt()) dims = {dim.toInt()};
  if (dim.isIntList()) dims = dim.toIntVector();
  const bool keeps_dims = rule.keepdim >= 0 && arguments[rule.keepdim].toBool();
  const Settings& settings = Machine::get().settings();
  const ReductionScratch scratch =
      scratch_of(describe(input, result.toTensor(), dims, keeps_dims), settings.num_multiprocessors,
                 settings.threads_per_multiprocessor);
  if (scratch.buffer_bytes) take_for_a_moment(scratch.buffer_bytes, scratch.semaphore_bytes);
}

}  // namespace sim
