// What losses take that are computed of all elements first, and then added up.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "torch_scratch.h"

namespace sim {
namespace {

using at::Tensor;

bool is_reduced(const ScratchCall& call, size_t reduction) {
  return call.arguments[reduction].toInt() != 0;
}

int64_t num_losses(const ScratchCall& call) {
  return c10::multiply_integers(
      at::infer_size(call.arguments[0].toTensor().sizes(), call.arguments[1].toTensor().sizes()));
}

// The result is allocated for all losses, and keeps its storage.
int64_t kept_of_two(const ScratchCall& call) { return is_reduced(call, 2) ? num_losses(call) : 0; }
int64_t kept_of_entropy(const ScratchCall& call) {
  return is_reduced(call, 3) ? num_losses(call) : 0;
}

Tensor sum_of(const Tensor& losses) { return at::empty({}, losses.options()); }

// huber_loss makes its result after the losses; of the others it is there.
void charge_losses(const ScratchCall& call) {
  if (!is_reduced(call, 2) || num_losses(call) == 0) return;
  const Tensor losses = call.shape(0).sub(call.shape(1));
  const Held all = hold(losses);
  call.make_results();
  hold_reduction(losses, sum_of(losses));
}

// The sum is another tensor, which the result takes over.
void charge_entropy(const ScratchCall& call) {
  if (!is_reduced(call, 3) || num_losses(call) == 0) return;
  const Tensor sum = sum_of(call.shape(0));
  const Held of_sum = hold(sum);
  hold_reduction(call.shape(0), sum);
}

// (log_probs [T, N, C], targets, lengths ..): the lengths of each sample, its target's among them,
// and where that begins.
std::vector<Held> hold_lengths(int64_t num_samples) {
  std::vector<Held> held;
  for (int i = 0; i < 3; i++) held.emplace_back(num_samples * kInt64Bytes);
  return held;
}

void charge_ctc(const ScratchCall& call) {
  if (call.argument(0).defined()) hold_lengths(call.argument(0).size(1));
}

// (gradient, log_probs, targets, lengths, lengths, neg_log_likelihood, log_alpha, ..)
void charge_ctc_backward(const ScratchCall& call) {
  if (!call.argument(1).defined()) return;
  const auto lengths = hold_lengths(call.argument(1).size(1));
  const Held log_beta(static_cast<int64_t>(call.arguments[6].toTensor().nbytes()));
}

}  // namespace

ScratchEntries scratch_of_losses() {
  return {
      {.operation = "aten::mse_loss",
       .charge = charge_losses,
       .source = "BinaryOps.cpp: mse_loss_out",
       .num_kept = kept_of_two},
      {.operation = "aten::smooth_l1_loss",
       .charge = charge_losses,
       .source = "BinaryOps.cpp: smooth_l1_loss_out",
       .num_kept = kept_of_two},
      {"aten::_ctc_loss", charge_ctc, "cuda/LossCTC.cu: ctc_loss_gpu_template", Results::kFirst,
       kOf11},
      {"aten::_ctc_loss_backward", charge_ctc_backward,
       "cuda/LossCTC.cu: ctc_loss_backward_gpu_template", Results::kFirst, kOf11},
      {"aten::huber_loss", charge_losses, "Loss.cpp: huber_loss", Results::kByRule},
      {.operation = "aten::binary_cross_entropy",
       .charge = charge_entropy,
       .source = "cuda/Loss.cu: binary_cross_entropy_out_cuda",
       .num_kept = kept_of_entropy},
  };
}

}  // namespace sim
