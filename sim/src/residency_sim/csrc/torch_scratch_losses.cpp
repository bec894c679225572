// What losses take that are computed of all elements first, and then added up.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>

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

void charge_two(const ScratchCall& call) {
  if (!is_reduced(call, 2) || num_losses(call) == 0) return;
  const Tensor losses = call.shape(0).sub(call.shape(1));
  const Held all = hold(losses);
  hold_reduction(losses, sum_of(losses));
}

void charge_huber(const ScratchCall& call) {
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

}  // namespace

ScratchEntries scratch_of_losses() {
  return {
      {.operation = "aten::mse_loss",
       .charge = charge_two,
       .source = "BinaryOps.cpp: mse_loss_out",
       .num_kept = kept_of_two},
      {.operation = "aten::smooth_l1_loss",
       .charge = charge_two,
       .source = "BinaryOps.cpp: smooth_l1_loss_out",
       .num_kept = kept_of_two},
      {"aten::huber_loss", charge_huber, "Loss.cpp: huber_loss", Results::kByRule},
      {.operation = "aten::binary_cross_entropy",
       .charge = charge_entropy,
       .source = "cuda/Loss.cu: binary_cross_entropy_out_cuda",
       .num_kept = kept_of_entropy},
  };
}

}  // namespace sim
