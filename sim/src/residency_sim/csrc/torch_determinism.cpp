#include "torch_determinism.h"

#include <ATen/Context.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <unordered_map>

#include "face.h"

namespace sim {
namespace {

using c10::FunctionSchema;
using c10::IValue;

bool is_inexact(c10::ScalarType type) {
  return c10::isFloatingType(type) || c10::isComplexType(type);
}

bool has_weights(const FunctionSchema&, const IValue* arguments) {
  return arguments[1].isTensor() && arguments[1].toTensor().defined();
}

bool takes_the_maximum(const FunctionSchema& schema, const IValue* arguments) {
  constexpr int64_t kMax = 2;  // of embedding_bag's modes
  return arguments[*schema.argumentIndexWithName("mode")].toInt() == kMax;
}

bool is_reduced(const FunctionSchema&, const IValue* arguments) {
  return arguments[3].toInt() != at::Reduction::None;
}

bool is_floating(const FunctionSchema&, const IValue* arguments) {
  return c10::isFloatingType(arguments[0].toTensor().scalar_type());
}

bool gives_indices(const FunctionSchema& schema, const IValue*) {
  return schema.overload_name().rfind("dim", 0) == 0;
}

// (self, dim, dtype, [out]): in the type of the sums, where there is something to add.
bool adds_inexact_numbers(const FunctionSchema& schema, const IValue* arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  if (self.dim() == 0 || self.numel() == 0) return false;
  if (schema.arguments().size() > 3) return is_inexact(arguments[3].toTensor().scalar_type());
  if (!arguments[2].isNone()) return is_inexact(arguments[2].toScalarType());
  return is_inexact(self.scalar_type());
}

bool multiplies(const FunctionSchema&, const IValue* arguments) {
  return arguments[4].toStringView() == "prod" && arguments[2].toTensor().numel() > 0;
}

// The list in the documentation of torch.use_deterministic_algorithms, with the conditions and
// the words of CUDA's kernels. Left out: `resize_` of quantized tensors, which are not modelled.
// The CPU's kernels of `put_` and `max_unpool*d` ask too, once they run: here the call does.
const std::unordered_map<std::string, DeterminismRule>& rules() {
  static const std::unordered_map<std::string, DeterminismRule> rules{
      {"aten::_adaptive_avg_pool2d_backward", {"adaptive_avg_pool2d_backward_cuda"}},
      {"aten::_adaptive_avg_pool3d_backward", {"adaptive_avg_pool3d_backward_cuda"}},
      {"aten::_ctc_loss_backward", {"ctc_loss_backward_gpu"}},
      {"aten::_embedding_bag_backward", {"embedding_bag_backward_cuda_max", takes_the_maximum}},
      {"aten::_embedding_bag_dense_backward",
       {"embedding_bag_backward_cuda_max", takes_the_maximum}},
      {"aten::_upsample_bicubic2d_aa_backward", {"upsample_bicubic2d_aa_backward_out_cuda"}},
      {"aten::_upsample_bilinear2d_aa_backward", {"upsample_bilinear2d_aa_backward_out_cuda"}},
      {"aten::adaptive_max_pool2d_backward", {"adaptive_max_pool2d_backward_cuda"}},
      {"aten::avg_pool3d_backward", {"avg_pool3d_backward_cuda"}},
      {"aten::bincount", {"_bincount_cuda", has_weights}},
      {"aten::cumsum", {"cumsum_cuda_kernel", adds_inexact_numbers}},
      {"aten::cumsum_", {"cumsum_cuda_kernel", adds_inexact_numbers}},
      {"aten::fractional_max_pool2d_backward", {"fractional_max_pool2d_backward_cuda"}},
      {"aten::fractional_max_pool3d_backward", {"fractional_max_pool3d_backward_cuda"}},
      {"aten::grid_sampler_2d_backward", {"grid_sampler_2d_backward_cuda"}},
      {"aten::grid_sampler_3d_backward", {"grid_sampler_3d_backward_cuda"}},
      {"aten::histc", {"_histc_cuda with floating point input", is_floating}},
      {"aten::max_unpool2d", {"max_unpooling2d_forward_out"}},
      {"aten::max_unpool3d", {"max_unpooling3d_forward_out"}},
      {"aten::median", {"median CUDA with indices output", gives_indices}},
      {"aten::nanmedian", {"median CUDA with indices output", gives_indices}},
      {"aten::nll_loss2d_forward", {"nll_loss2d_forward_out_cuda_template", is_reduced}},
      {"aten::put_", {"put_"}},
      {"aten::reflection_pad1d_backward", {"reflection_pad1d_backward_out_cuda"}},
      {"aten::reflection_pad2d_backward", {"reflection_pad2d_backward_cuda"}},
      {"aten::reflection_pad3d_backward", {"reflection_pad3d_backward_out_cuda"}},
      {"aten::scatter_reduce", {"scatter_reduce_cuda_prod_", multiplies}},
      {"aten::scatter_reduce_", {"scatter_reduce_cuda_prod_", multiplies}},
      {"aten::upsample_bicubic2d_backward", {"upsample_bicubic2d_backward_out_cuda"}},
      {"aten::upsample_bilinear2d_backward", {"upsample_bilinear2d_backward_out_cuda"}},
      {"aten::upsample_linear1d_backward", {"upsample_linear1d_backward_out_cuda"}},
      {"aten::upsample_trilinear3d_backward", {"upsample_trilinear3d_backward_out_cuda"}},
  };
  return rules;
}

}  // namespace

const DeterminismRule* determinism_rule(const FunctionSchema& schema) {
  if (!face().is_cuda) return nullptr;
  const auto found = rules().find(schema.name());
  return found == rules().end() ? nullptr : &found->second;
}

void check_deterministic(const DeterminismRule& rule, const FunctionSchema& schema,
                         const IValue* arguments) {
  if (!at::globalContext().deterministicAlgorithms()) return;
  if (rule.applies && !rule.applies(schema, arguments)) return;
  at::Context::alertNotDeterministic(rule.caller);
}

void check_blas_is_deterministic() {
  const at::Context& context = at::globalContext();
  if (!face().is_cuda || !context.deterministicAlgorithms()) return;
  const char* config = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  const std::string_view found = config ? config : "";
  if (found == ":4096:8" || found == ":16:8") return;
  constexpr const char* kMessage =
      "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` "
      "or `at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic "
      "because it uses CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this "
      "case, you must set an environment variable before running your PyTorch application: "
      "CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8. For more information, go "
      "to https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility";
  if (context.deterministicAlgorithmsWarnOnly()) {
    TORCH_WARN(kMessage);
  } else {
    TORCH_CHECK(false, kMessage);
  }
}

}  // namespace sim
