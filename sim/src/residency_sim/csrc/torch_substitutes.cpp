#include "torch_substitutes.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "torch_determinism.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

// The kernels' names in CUDA's messages.
const char* kernel_name(const std::string& operation) {
  static const std::unordered_map<std::string, const char*> names{
      {"aten::mm", "addmm_cuda"},
      {"aten::addmm", "addmm_cuda"},
      {"aten::_addmm_activation", "addmm_cuda"},
      {"aten::bmm", "baddbmm_cuda"},
      {"aten::baddbmm", "baddbmm_cuda"},
      {"aten::addmv", "addmv_impl_cuda"},
      {"aten::dot", "dot"},
      {"aten::vdot", "vdot"},
  };
  const auto found = names.find(operation);
  return found == names.end() ? nullptr : found->second;
}

size_t place_of_dtype(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return name == "aten::mm" || name == "aten::bmm" ? 2 : 3;
}

// mm.dtype and its fellows, for which torch has no CPU kernel.
bool names_result_dtype(const c10::FunctionSchema& schema) {
  const std::string& overload = schema.overload_name();
  return (overload == "dtype" || overload == "dtype_out") && kernel_name(schema.name());
}

void call_in_result_dtype(const c10::FunctionSchema& schema, const IValue* arguments,
                          size_t num_arguments, torch::jit::Stack* stack) {
  const size_t place = place_of_dtype(schema);
  const c10::ScalarType dtype = arguments[place].toScalarType();
  const c10::ScalarType given = arguments[place - 1].toTensor().scalar_type();
  TORCH_CHECK(dtype == given || (dtype == c10::kFloat && c10::isReducedFloatingType(given)),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  for (const auto i : c10::irange(num_arguments)) {
    if (i == place) continue;
    stack->push_back(i < place ? IValue(arguments[i].toTensor().to(dtype)) : arguments[i]);
  }
  const bool is_out = schema.overload_name() == "dtype_out";
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(schema.name().c_str(), is_out ? "out" : "")
      .callBoxed(stack);
}

// The CPU's kernel for half and bfloat16 leaves every whole vector of the parameters as it was, and
// reads past the end of the momentum (pytorch issue 191763). CUDA's computes in float32.
bool is_half_sgd(const c10::FunctionSchema& schema) { return schema.name() == "aten::_fused_sgd_"; }

void call_half_sgd(const c10::OperatorHandle& op, c10::DispatchKey key, const IValue* arguments,
                   size_t num_arguments, torch::jit::Stack* stack) {
  constexpr size_t kNumLists = 3;  // parameters, gradients, momentum
  std::vector<std::pair<Tensor, Tensor>> narrowed;
  for (const auto i : c10::irange(num_arguments)) {
    if (i >= kNumLists) {
      stack->push_back(arguments[i]);
      continue;
    }
    c10::List<Tensor> wide;
    for (const Tensor& tensor : arguments[i].toTensorVector()) {
      const bool is_narrow = c10::isReducedFloatingType(tensor.scalar_type());
      wide.push_back(is_narrow ? tensor.to(c10::kFloat) : tensor);
      if (is_narrow) narrowed.emplace_back(tensor, wide.get(wide.size() - 1));
    }
    stack->push_back(std::move(wide));
  }
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  for (const auto& [tensor, wide] : narrowed) tensor.copy_(wide);
}

// CUDA's own dropout, with the arithmetic of the CPU's.
bool is_dropout(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::_fused_dropout" && schema.overload_name().empty();
}

void call_dropout(const IValue* arguments, torch::jit::Stack* stack) {
  const Tensor& input = arguments[0].toTensor();
  const double kept = arguments[1].toDouble();
  Tensor mask = at::empty_like(input, input.options().dtype(c10::kByte));
  mask.bernoulli_(kept, arguments[2].toOptional<at::Generator>());
  Tensor output = input.mul(mask.view(c10::kBool)).mul_(kept == 0.0 ? 0.0 : 1.0 / kept);
  stack->emplace_back(std::move(output));
  stack->emplace_back(std::move(mask));
}

// CUDA's counts whole numbers, the CPU's none. Float64 has all that its bounds can tell apart.
bool is_histogram(const c10::FunctionSchema& schema) { return schema.name() == "aten::histc"; }

void call_histogram(const c10::OperatorHandle& op, c10::DispatchKey key, const IValue* arguments,
                    size_t num_arguments, torch::jit::Stack* stack) {
  stack->insert(stack->end(), arguments, arguments + num_arguments);
  const Tensor& input = arguments[0].toTensor();
  const auto type = input.scalar_type();
  const bool is_whole = c10::isIntegralType(type, /*includeBool=*/false);
  if (key != c10::DispatchKey::CPU || !is_whole || num_arguments > 4) {
    return op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  }
  *(stack->end() - static_cast<std::ptrdiff_t>(num_arguments)) = input.to(c10::kDouble);
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  stack->back() = stack->back().toTensor().to(type);
}

// Softmax of half in float32, and the gradient of that: torch has CUDA kernels only.
bool is_softmax(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::_softmax" || schema.name() == "aten::_log_softmax";
}

bool is_softmax_backward(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::_softmax_backward_data" ||
         schema.name() == "aten::_log_softmax_backward_data";
}

void call_softmax(const c10::OperatorHandle& op, c10::DispatchKey key, const IValue* arguments,
                  size_t num_arguments, torch::jit::Stack* stack) {
  stack->insert(stack->end(), arguments, arguments + num_arguments);
  IValue* taken = &*(stack->end() - static_cast<std::ptrdiff_t>(num_arguments));
  if (key == c10::DispatchKey::CPU && taken[2].toBool()) {
    taken[0] = taken[0].toTensor().to(c10::kFloat);
    taken[2] = false;
  }
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
}

void call_softmax_backward(const c10::OperatorHandle& op, c10::DispatchKey key,
                           const IValue* arguments, size_t num_arguments,
                           torch::jit::Stack* stack) {
  const c10::ScalarType wide = arguments[0].toTensor().scalar_type();
  const c10::ScalarType narrow = arguments[3].toScalarType();
  stack->insert(stack->end(), arguments, arguments + num_arguments);
  const bool is_own = key != c10::DispatchKey::CPU || wide == narrow;
  if (is_own) return op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  (*stack)[stack->size() - num_arguments + 3] = wide;
  const bool has_out = num_arguments > 4;
  Tensor out = has_out ? arguments[4].toTensor() : Tensor();
  if (has_out) stack->back() = at::empty_like(arguments[1].toTensor());
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  const Tensor gradient = stack->back().toTensor().to(narrow);
  if (!has_out) {
    stack->back() = gradient;
    return;
  }
  if (out.sizes() != gradient.sizes()) out.resize_(gradient.sizes());
  out.copy_(gradient);
  stack->back() = out;
}

// Torch has it for CUDA alone, and for the host the plain operations that it stands for, of which
// these are the derivatives, one after the other: the CPU's bits.
bool is_rms_norm_backward(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::_fused_rms_norm_backward" && schema.overload_name().empty();
}

void call_rms_norm_backward(const IValue* arguments, torch::jit::Stack* stack) {
  const Tensor given = arguments[1].toTensor();
  const auto type = at::toOpMathType(given.scalar_type());
  const Tensor gradient = arguments[0].toTensor().to(type);
  const Tensor input = given.to(type);
  const Tensor& deviation = arguments[3].toTensor();
  const Tensor weight = arguments[4].isNone() ? Tensor() : arguments[4].toTensor();
  const auto mask = arguments[5].toBoolList();
  const auto num_dims = static_cast<int64_t>(arguments[2].toIntVector().size());
  Tensor of_input, of_weight;
  if (mask.get(1) && weight.defined()) {
    of_weight = (gradient * (input * deviation)).sum_to_size(weight.sizes());
    of_weight = of_weight.to(weight.scalar_type());
  }
  if (mask.get(0)) {
    const Tensor above = weight.defined() ? gradient * weight : gradient;
    const Tensor of_deviation = (above * input).sum_to_size(deviation.sizes());
    const Tensor of_mean = -0.5 * of_deviation * deviation.pow(3);
    int64_t width = 1;
    for (int64_t i = 1; i <= num_dims; i++) width *= input.size(-i);
    const Tensor of_square = of_mean.expand(input.sizes()) / width;
    of_input = (above * deviation + of_square * (2 * input)).to(given.scalar_type());
  }
  stack->emplace_back(std::move(of_input));
  stack->emplace_back(std::move(of_weight));
}

// CUDA keeps the mean and the deviation of bfloat16 and half inputs in float32, the CPU in the type
// of the parameters. The device holds CUDA's, of the CPU's values: widened they lose nothing. Of a
// batch norm in evaluation CUDA keeps both, though they are never written; the CPU keeps neither.
// Source: batch_norm_cuda in aten/src/ATen/native/cuda/Normalization.cu.
bool is_batch_norm(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::native_batch_norm" && schema.overload_name().empty();
}

bool is_norm(const c10::FunctionSchema& schema) {
  return is_batch_norm(schema) ||
         (schema.name() == "aten::native_layer_norm" && schema.overload_name().empty());
}

void call_norm(const c10::OperatorHandle& op, c10::DispatchKey key, const IValue* arguments,
               size_t num_arguments, torch::jit::Stack* stack) {
  stack->insert(stack->end(), arguments, arguments + num_arguments);
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  if (key != c10::DispatchKey::CPU) return;
  const Tensor output = (stack->end() - 3)->toTensor();
  for (auto result = stack->end() - 2; result != stack->end(); ++result) {
    const Tensor& statistics = result->toTensor();
    if (is_batch_norm(op.schema()) && statistics.numel() == 0) {
      const auto type = at::toOpMathType(output.scalar_type());
      *result = at::zeros({output.size(1)}, output.options().dtype(type));
    } else if (c10::isReducedFloatingType(statistics.scalar_type())) {
      *result = statistics.to(c10::kFloat);
    }
  }
}

bool is_norm_backward(const c10::FunctionSchema& schema) {
  return (schema.name() == "aten::native_layer_norm_backward" ||
          schema.name() == "aten::native_batch_norm_backward") &&
         schema.overload_name().empty();
}

// The CPU's kernel takes float32 statistics beside float32 parameters alone.
void narrow_statistics(const c10::FunctionSchema& schema, IValue* arguments) {
  auto at = [&](const char* name) -> IValue* {
    const auto index = schema.argumentIndexWithName(name);
    return index && !arguments[*index].isNone() ? &arguments[*index] : nullptr;
  };
  const auto type = at("input")->toTensor().scalar_type();
  if (!c10::isReducedFloatingType(type)) return;
  for (const char* name : {"weight", "bias", "running_mean", "running_var"}) {
    const IValue* parameter = at(name);
    if (parameter && parameter->toTensor().scalar_type() == c10::kFloat) return;
  }
  for (const char* name : {"mean", "rstd", "save_mean", "save_invstd"}) {
    IValue* statistics = at(name);
    if (statistics) *statistics = statistics->toTensor().to(type);
  }
}

void call_norm_backward(const c10::OperatorHandle& op, c10::DispatchKey key,
                        const IValue* arguments, size_t num_arguments, torch::jit::Stack* stack) {
  stack->insert(stack->end(), arguments, arguments + num_arguments);
  if (key == c10::DispatchKey::CPU) {
    narrow_statistics(op.schema(), &*(stack->end() - static_cast<std::ptrdiff_t>(num_arguments)));
  }
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
}

}  // namespace

void check_product(const c10::FunctionSchema& schema, const IValue* arguments,
                   size_t num_arguments) {
  const char* kernel = kernel_name(schema.name());
  if (!kernel) return;
  for (const auto i : c10::irange(num_arguments)) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    const Tensor& tensor = arguments[i].toTensor();
    if (tensor.numel() == 0) return;
    TORCH_CHECK_NOT_IMPLEMENTED(!c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true),
                                '"', kernel, "\" not implemented for '",
                                c10::toString(tensor.scalar_type()), "'");
  }
  check_blas_is_deterministic();
}

void check_indexed(const std::string& name, const IValue& indexed) {
  const bool is_index = name.find("index") != std::string::npos;
  TORCH_CHECK(!is_index || !indexed.isTensor() || !indexed.toTensor().is_cpu(),
              "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
}

void check_fused_step(const c10::FunctionSchema& schema, const IValue* arguments) {
  struct Step {
    size_t num_lists;  // parameters, gradients and states, of which the last may be empty
    const char* message;
    const char* longer_message;  // where it is not
  };
  // The checks of FusedAdamKernel.cu, FusedAdamWKernel.cu, FusedAdagradKernel.cu and
  // FusedSgdKernel.cu, whose last has no words of its own.
#define UNWORDED(lists)                                                                   \
  "Expected at::native::check_fast_path_restrictions({" lists                             \
  "}) to be true, but got false.  (Could this error message be improved?  If so, please " \
  "report an enhancement request to PyTorch.)"
  static const Step adam{
      5, "params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout",
      "params, grads, exp_avgs, exp_avg_sqs, and max_exp_avg_sqs must have same dtype, device, and "
      "layout"};
  static const Step adagrad{
      3, "", "params, grads, and state_sums must have same dtype, device, and layout"};
  static const std::unordered_map<std::string, Step> steps{
      {"aten::_fused_adam_", adam},
      {"aten::_fused_adamw_", adam},
      {"aten::_fused_adagrad_", adagrad},
      {"aten::_fused_sgd_",
       {3, UNWORDED("params, grads"), UNWORDED("params, grads, momentum_buffer_list")}},
  };
#undef UNWORDED
  const auto found = steps.find(schema.name());
  if (found == steps.end() || schema.overload_name().find("out") != std::string::npos) return;
  const Step& step = found->second;
  const std::vector<Tensor> parameters = arguments[0].toTensorVector();
  const bool has_all = !arguments[step.num_lists - 1].toTensorVector().empty();
  for (const auto i : c10::irange(step.num_lists)) {
    const std::vector<Tensor> list = arguments[i].toTensorVector();
    for (const auto j : c10::irange(std::min(list.size(), parameters.size()))) {
      const Tensor& tensor = list[j];
      bool is_alike = tensor.layout() == c10::kStrided && tensor.is_non_overlapping_and_dense() &&
                      tensor.sizes() == parameters[j].sizes();
      for (const auto dim : c10::irange(is_alike ? tensor.dim() : 0)) {
        is_alike &= tensor.size(dim) == 1 || tensor.stride(dim) == parameters[j].stride(dim);
      }
      TORCH_CHECK(is_alike, has_all ? step.longer_message : step.message);
    }
  }
}

bool has_substitute(const c10::FunctionSchema& schema) {
  return names_result_dtype(schema) || is_half_sgd(schema) || is_dropout(schema) ||
         is_softmax(schema) || is_softmax_backward(schema) || is_rms_norm_backward(schema) ||
         is_norm(schema) || is_norm_backward(schema) || is_histogram(schema);
}

void call_substitute(const c10::OperatorHandle& op, c10::DispatchKey key, const IValue* arguments,
                     size_t num_arguments, torch::jit::Stack* stack) {
  if (is_half_sgd(op.schema())) return call_half_sgd(op, key, arguments, num_arguments, stack);
  if (is_dropout(op.schema())) return call_dropout(arguments, stack);
  if (is_softmax(op.schema())) return call_softmax(op, key, arguments, num_arguments, stack);
  if (is_softmax_backward(op.schema())) {
    return call_softmax_backward(op, key, arguments, num_arguments, stack);
  }
  if (is_rms_norm_backward(op.schema())) return call_rms_norm_backward(arguments, stack);
  if (is_norm(op.schema())) return call_norm(op, key, arguments, num_arguments, stack);
  if (is_norm_backward(op.schema())) {
    return call_norm_backward(op, key, arguments, num_arguments, stack);
  }
  if (is_histogram(op.schema())) return call_histogram(op, key, arguments, num_arguments, stack);
  call_in_result_dtype(op.schema(), arguments, num_arguments, stack);
}

}  // namespace sim
