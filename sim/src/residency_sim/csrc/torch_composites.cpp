// Operations that torch has for CUDA and its like alone, without a kernel for the host to fall back
// on, and that its layers call there: the cells of LSTM and GRU layers, out of plain operations,
// dropout, and the question whether a vendor's library computes the CTC loss.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_dropout.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include "registration.h"

namespace sim {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor plus(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cell, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias) {
  const Tensor gates = plus(input_gates, input_bias) + plus(hidden_gates, hidden_bias);
  const auto parts = gates.chunk(4, 1);
  const Tensor new_cell = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * new_cell.tanh(), new_cell, gates.detach()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hidden, const MaybeTensor& input_bias,
                                    const MaybeTensor& hidden_bias) {
  const auto of_input = plus(input_gates, input_bias).chunk(3, 1);
  const auto of_hidden = plus(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (of_input[0] + of_hidden[0]).sigmoid();
  const Tensor keep = (of_input[1] + of_hidden[1]).sigmoid();
  const Tensor fresh = (of_input[2] + of_hidden[2] * reset).tanh();
  return {(hidden - fresh) * keep + fresh, input_gates.detach()};
}

bool use_library(const Tensor&, const Tensor&, c10::IntArrayRef, c10::IntArrayRef, int64_t) {
  return false;
}
bool use_library_for_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) {
  return false;
}

// The CPU's has no generator and draws from the host's. This one draws from the device's, and as
// CUDA's only where something is drawn.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double probability,
                                   std::optional<bool> train) {
  const auto mask_options = input.options().dtype(c10::kBool);
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, mask_options)};
  if (probability == 1.0 || input.numel() == 0) {
    return {at::zeros_like(input), at::zeros_like(input, mask_options)};
  }
  auto [output, mask] = at::_fused_dropout(input, 1.0 - probability);
  return {output, mask.view(c10::kBool)};
}

void add_cells(torch::Library& library) {
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_gru_cell", gru_cell);
}

}  // namespace

// Above autograd, so that it sees the plain operations; and below it, for inference.
RESIDENCY_KERNELS(aten, face().autograd_key, library) { add_cells(library); }

RESIDENCY_KERNELS(aten, face().key, library) {
  add_cells(library);
  library.impl("native_dropout", dropout);
  library.impl("_use_cudnn_ctc_loss", use_library);
  library.impl("_use_cudnn_ctc_loss.Tensor", use_library_for_tensors);
  library.impl("_use_miopen_ctc_loss", use_library);
  library.impl("_use_miopen_ctc_loss.Tensor", use_library_for_tensors);
}

}  // namespace sim
