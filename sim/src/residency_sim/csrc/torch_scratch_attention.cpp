// Scratch of CUDA's fused attention; the kernels are the CPU's (torch_attention.cpp), and say what
// a call is of.
#include "torch_scratch_attention.h"

#include <ATen/Context.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "torch_scratch.h"

namespace sim {
namespace {

using at::Tensor;

// The flash kernel's own rounding of a head's width.
int64_t rounded_width(int64_t width) { return to_multiple(width, width <= 128 ? 32 : 64); }

// query [batch, heads, length, width], key and value [batch, groups, length, width], whether it
// drops and, in a backward pass, the gradient of the output and the output.
struct AttentionCall {
  explicit AttentionCall(const ScratchCall& call)
      : query(call.arguments[0].toTensor()),
        key(call.arguments[1].toTensor()),
        value(call.arguments[2].toTensor()),
        drops(call.arguments[3].toBool()) {
    if (call.arguments.size() <= 4) return;
    gradient = call.arguments[4].toTensor();
    output = call.arguments[5].toTensor();
  }
  Tensor query, key, value;
  bool drops;
  Tensor gradient, output;
};

// [batch, heads, length, width] -> what a kernel takes that wants [batch, length, heads, width].
int64_t bytes_to_be_length_first(const Tensor& tensor) {
  return bytes_to_be_contiguous(tensor.transpose(1, 2));
}

// How many parts the keys are split into where few blocks would keep the device half idle.
// Source: num_splits_heuristic in ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
int64_t num_splits_of(int64_t num_blocks, int64_t num_at_once, int64_t num_key_blocks) {
  constexpr int64_t kMostSplits = 128;
  constexpr double kFullEnough = 0.8, kNearTheBest = 0.85;
  if (static_cast<double>(num_blocks) >= kFullEnough * static_cast<double>(num_at_once)) return 1;
  const int64_t most = std::min({kMostSplits, num_at_once, num_key_blocks});
  std::vector<double> efficiency;
  for (const auto splits : c10::irange<int64_t>(1, most + 1)) {
    const bool is_new =
        splits == 1 || divide_up(num_key_blocks, splits) != divide_up(num_key_blocks, splits - 1);
    const double waves =
        static_cast<double>(num_blocks * splits) / static_cast<double>(num_at_once);
    efficiency.push_back(is_new ? waves / std::ceil(waves) : 0.0);
  }
  const double best = *std::max_element(efficiency.begin(), efficiency.end());
  const auto found = std::find_if(efficiency.begin(), efficiency.end(), [&](double each) {
    return each > 0 && each >= kNearTheBest * best;
  });
  return found == efficiency.end() ? 1 : found - efficiency.begin() + 1;
}

// A single query of grouped heads counts as so many queries of one head. Source: mha_fwd and
// set_params_splitkv in the same file.
void charge_flash(const ScratchCall& call) {
  const AttentionCall of(call);
  if (of.drops) return;
  constexpr int64_t kQueriesOfBlock = 64;
  const int64_t width = of.query.size(3);
  const int64_t num_queries = of.query.numel() / width;
  const bool is_swapped = of.query.size(2) == 1 && of.query.size(1) > of.key.size(1);
  const int64_t num_rows = of.query.size(0) * (is_swapped ? of.key : of.query).size(1);
  const int64_t num_blocks = num_rows * divide_up(num_queries / num_rows, kQueriesOfBlock);
  const int64_t num_keys_of_block = width <= 64 ? 256 : width <= 128 ? 128 : 64;
  const int64_t num_splits =
      num_splits_of(num_blocks, 2 * Machine::get().settings().num_multiprocessors,
                    divide_up(of.key.size(2), num_keys_of_block));
  if (num_splits == 1) return;
  const Held sums(num_splits * num_queries * kFloatBytes);
  const Held outputs(num_splits * num_queries * rounded_width(width) * kFloatBytes);
}

// Source: mha_bwd in the same file, and _flash_attention_backward in attention_backward.cu.
void charge_flash_backward(const ScratchCall& call) {
  const AttentionCall of(call);
  constexpr int64_t kLengthMultiple = 128;
  const int64_t batch = of.query.size(0), num_heads = of.query.size(1);
  const int64_t num_queries = batch * num_heads * to_multiple(of.query.size(2), kLengthMultiple);
  const int64_t num_multiprocessors = Machine::get().settings().num_multiprocessors;
  const int64_t num_copies =
      is_deterministic() ? divide_up(num_multiprocessors, batch * num_heads) : 1;
  const bool is_grouped = of.key.size(1) != num_heads;
  const int64_t expanded_bytes = is_grouped ? batch * num_heads * of.key.size(2) * of.key.size(3) *
                                                  static_cast<int64_t>(of.key.element_size())
                                            : 0;
  const Held whole_gradient(bytes_to_be_length_first(of.gradient));
  const Held whole_output(bytes_to_be_length_first(of.output));
  const Held row_sums(num_queries * kFloatBytes);
  const Held query_sums(num_copies * num_queries * rounded_width(of.query.size(3)) * kFloatBytes);
  const Held expanded_keys(expanded_bytes);
  const Held expanded_values(expanded_bytes);
}

// ----------------------------------------------------------------------- the memory-efficient one

// A kernel of CUTLASS for the backward pass: so many queries and keys in a block, and whether it
// keeps the gradients of keys and values in registers.
struct Tile {
  int64_t num_queries, num_keys;
  bool in_registers;
};

// The first one of its list that the shared memory of a block can hold: 64 KiB on a T4, 99 on cards
// for desktops, 163 on an A100, 227 on an H100. Source: kernels/cutlassB.h in
// ATen/native/transformers/cuda/mem_eff_attention; the sizes are those of its SharedStorage, as
// nvcc compiles it: of half 53.5 KiB with 128 x 64 (89.5 KiB up to a width of 96), 158.5 with
// 128 x 128; of float32 118.5 with 128 x 64.
Tile tile_of(int64_t width, bool is_half, bool drops) {
  constexpr int64_t kTensorCores = 80;
  const int64_t capability = Machine::get().settings().capability;
  const bool has_large_blocks =
      capability == 80 || capability == 87 || capability / 10 == 9 || capability / 10 == 10;
  if (width <= 64) return {64, 64, is_half};
  if (!is_half) return {has_large_blocks ? 128 : 64, 64, false};
  if (width > 128) return {128, 64, false};
  if (capability < kTensorCores) return {128, 64, true};
  const bool is_narrow_case = capability == 86 || capability == 89;
  if (width <= 96 && is_narrow_case && !drops) return {128, 64, true};
  return has_large_blocks ? Tile{128, 128, true} : Tile{64, 64, false};
}

// Source: workspace_size in mem_eff_attention/kernel_backward.h: a tile of the queries' gradient
// for each block with a lock, and float32 sums of the others where registers do not hold them.
int64_t efficient_workspace_bytes(const AttentionCall& of) {
  constexpr int64_t kLockBytes = 16, kMostSplitRows = 200;
  const int64_t num_rows = of.query.size(0) * of.query.size(1);
  const int64_t num_keys = of.key.size(2);
  const int64_t width = of.query.size(3), value_width = of.value.size(3);
  const bool is_half = c10::isReducedFloatingType(of.query.scalar_type());
  const Tile tile = tile_of(std::max(width, value_width), is_half, of.drops);
  const int64_t num_tiles =
      divide_up(of.query.size(2), tile.num_queries) * divide_up(width, tile.num_keys);
  int64_t num_floats =
      num_tiles * (kLockBytes + tile.num_queries * tile.num_keys * kFloatBytes) / kFloatBytes;
  if (is_half && !tile.in_registers) {
    const int64_t num_splits =
        is_deterministic() ? 1
                           : std::max<int64_t>(1, std::min(divide_up(num_keys, tile.num_keys),
                                                           kMostSplitRows / num_rows));
    num_floats +=
        num_splits * tile.num_keys *
        (to_multiple(width, tile.num_queries) + to_multiple(value_width, tile.num_queries));
  }
  return num_rows * to_multiple(num_floats, 4) * kFloatBytes;
}

// Source: kNeedsOutputAccumulatorBuffer in mem_eff_attention/kernel_forward.h.
void charge_efficient(const ScratchCall& call) {
  const AttentionCall of(call);
  constexpr int64_t kWidestInRegisters = 128;
  const int64_t width = std::max(of.query.size(3), of.value.size(3));
  const bool is_half = c10::isReducedFloatingType(of.query.scalar_type());
  if (!is_half || width <= kWidestInRegisters) return;
  const Held sums(of.query.numel() / of.query.size(3) * of.value.size(3) * kFloatBytes);
}

// Source: _efficient_attention_backward in attention_backward.cu: what is declared first, the
// workspace, is the last to go.
void charge_efficient_backward(const ScratchCall& call) {
  const AttentionCall of(call);
  const int64_t row_bytes = of.query.numel() / of.query.size(3) * kFloatBytes;
  const Held whole_gradient(bytes_to_be_length_first(of.gradient));
  Held workspace(0);
  const Held row_sums([&] {
    if (c10::isReducedFloatingType(of.query.scalar_type())) return Held(row_bytes);
    const Held product(of.output.numel() * kFloatBytes);
    Held sums(row_bytes);
    const bool lie_by_head = of.query.size(1) == 1 || of.query.size(2) == 1;
    return lie_by_head ? std::move(sums) : Held(row_bytes);
  }());
  workspace = Held(efficient_workspace_bytes(of));
}

// ------------------------------------------------------------------------------------ cuDNN's own

// cuDNN's plan takes so much beside what cudnn-frontend asks for, in either direction. No public
// source says it: measured on an H100, torch 2.11, cuDNN 9.19, with heads of 64 to 256.
constexpr int64_t kOfPlan = 256;

void charge_cudnn(const ScratchCall&) { const Held workspace(kOfPlan); }

// What cudnn-frontend asks for: float32 sums of the query's gradient, and a number for each row;
// and the gradients of keys and values for all heads, where heads are grouped.
void charge_cudnn_backward(const ScratchCall& call) {
  const AttentionCall of(call);
  const int64_t num_heads = of.query.size(1), num_rows = of.query.numel() / of.query.size(3);
  const int64_t of_sums = num_rows * (of.query.size(3) + 1) * kFloatBytes;
  const auto expanded = [&](const Tensor& grouped) {
    if (grouped.size(1) == num_heads) return int64_t{0};
    return static_cast<int64_t>(grouped.nbytes()) / grouped.size(1) * num_heads;
  };
  const Held in_order(of.gradient.stride(-1) == 1 ? 0 : static_cast<int64_t>(of.gradient.nbytes()));
  const Held workspace(of_sums + expanded(of.key) + expanded(of.value) + kOfPlan);
}

}  // namespace

bool is_deterministic() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
}

ScratchEntries scratch_of_attention() {
  const char* of_plan = "256 bytes of cuDNN's plan, on an H100";
  return {
      {"aten::_scaled_dot_product_flash_attention", charge_flash,
       "transformers/cuda/flash_attn/flash_api.cpp: mha_fwd, set_params_splitkv"},
      {"aten::_scaled_dot_product_flash_attention_backward", charge_flash_backward,
       "transformers/cuda/flash_attn/flash_api.cpp: mha_bwd"},
      {"aten::_scaled_dot_product_efficient_attention", charge_efficient,
       "transformers/cuda/mem_eff_attention/kernel_forward.h: kNeedsOutputAccumulatorBuffer"},
      {"aten::_scaled_dot_product_efficient_attention_backward", charge_efficient_backward,
       "transformers/cuda/attention_backward.cu: _efficient_attention_backward"},
      {.operation = "aten::_scaled_dot_product_cudnn_attention",
       .charge = charge_cudnn,
       .source = "cudnn/MHA.cpp: run_cudnn_SDP_fprop",
       .versions = kOf11,
       .measured = of_plan},
      {.operation = "aten::_scaled_dot_product_cudnn_attention_backward",
       .charge = charge_cudnn_backward,
       .source = "cudnn/MHA.cpp: run_cudnn_SDP_bprop; cudnn-frontend: CompositeSDPABackwardNode",
       .versions = kOf11,
       .measured = of_plan},
  };
}

}  // namespace sim
