// [Note: workspaces of cuDNN] torch asks cuDNN for plans, the likely fastest first, asks its
// allocator for the workspace of each, and goes on to the next plan where there is no room; the
// last are those of a fallback list. With `benchmark` it runs each plan once for each new shape, in
// the largest workspace that any of them wants, and gives the cache back. Source: try_configs,
// generate_and_filter_plans and run_single_conv in ATen/native/cudnn/Conv_v8.cpp.
//
// How much a plan wants is not public. Measured (H100 and H200, torch 2.11.0+cu130, 252 rows and
// three scripts): copies with the channels last and in groups of eight, for kernels of tensor
// cores; partial sums of as many blocks as run at once; without tensor cores, tiles of Winograd's
// and Fourier's transforms; in trials, Fourier's of whole pictures and copies in float32.
#include "torch_convolutions.h"

#include <ATen/Context.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/sum.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <set>
#include <vector>

#include "workspaces.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using Note = Journal::Note;

constexpr int64_t kChannelsTogether = 8;     // channels
constexpr int64_t kSumsOfBlock = 128 * 256;  // the largest tile of a block
constexpr int64_t kMostSplits = 128;         // of one result among blocks
constexpr int64_t kCopiesOfTrial = 4;        // in float32; three were seen
constexpr int64_t kMostFourier = 256;        // the longest side of a whole picture

enum class Pass { kForward, kInput, kWeight };

// One that is not transposed: of one that is, the input is the result.
struct Convolution {
  int64_t batch, groups, element_bytes;
  int64_t inputs, outputs;  // channels
  std::vector<int64_t> input_size, output_size, kernel_size;
  bool has_steps;  // a stride, or a dilation
  bool is_last;    // the channels are
  bool has_tensor_cores;

  int64_t num_of_images(int64_t in, int64_t out) const {
    return batch *
           (in * c10::multiply_integers(input_size) + out * c10::multiply_integers(output_size));
  }
  int64_t num_weights(int64_t in, int64_t out) const {
    return in / groups * out * c10::multiply_integers(kernel_size);
  }
  int64_t to_vectors(int64_t channels) const {
    return to_multiple(divide_up(channels, groups), kChannelsTogether) * groups;
  }
};

bool are_all(c10::IntArrayRef numbers, int64_t one) {
  return std::all_of(numbers.begin(), numbers.end(), [&](int64_t each) { return each == one; });
}

bool is_last(const Tensor& tensor) {
  const auto format = tensor.suggest_memory_format();
  return format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d;
}

// Whether torch computes it itself. Source: use_cudnn and use_cudnn_depthwise in Convolution.cpp.
// Whether a program has switched cuDNN off is not known: in CUDA's place it always is.
bool is_without_cudnn(const Convolution& of, c10::ScalarType type, bool is_transposed) {
  if (of.num_of_images(1, 1) == 0) return true;
  if (type != c10::kFloat && !c10::isReducedFloatingType(type)) return true;
  if (of.groups == 1 || of.groups != of.inputs || is_transposed || of.is_last) return false;
  const int64_t width = of.kernel_size.back();
  const bool has_kernel = are_all(of.kernel_size, width) && width <= 5 && width % 2 == 1;
  return of.kernel_size.size() > 1 && !(type == c10::kHalf && has_kernel);
}

// 6 x 6 numbers for each 4 x 4 of a picture, and as many for each 3 x 3 weights.
int64_t winograd_bytes(const Convolution& of) {
  constexpr int64_t kResults = 4, kPoints = 6;
  const auto in_tiles = [&](c10::IntArrayRef size) {
    int64_t num = 1;
    for (const int64_t length : size) num *= divide_up(length, kResults) * kPoints;
    return num;
  };
  const int64_t of_images =
      of.inputs * in_tiles(of.input_size) + of.outputs * in_tiles(of.output_size);
  return kFloatBytes * (of.batch * of_images + of.inputs * of.outputs * kPoints * kPoints);
}

// Half of the complex numbers of a tile with such sides, for each pair of channels and, as often as
// it has tiles, for each channel of each picture.
int64_t fourier_bytes(const Convolution& of, int64_t side, int64_t num_tiles, int64_t num_weights) {
  const int64_t tile_bytes = side * (side / 2 + 1) * 2 * kFloatBytes;
  return tile_bytes *
         (of.batch * num_tiles * (of.inputs + of.outputs) + num_weights * of.inputs * of.outputs);
}

int64_t tiled_fourier_bytes(const Convolution& of, int64_t num_weights) {
  constexpr int64_t kSide = 32;
  int64_t num_tiles = 1;
  for (const auto i : c10::irange(of.output_size.size())) {
    num_tiles *= divide_up(of.output_size[i], std::max<int64_t>(1, kSide + 1 - of.kernel_size[i]));
  }
  return fourier_bytes(of, kSide, num_tiles, num_weights);
}

int64_t whole_fourier_bytes(const Convolution& of) {
  int64_t side = 1;
  for (const auto i : c10::irange(of.input_size.size())) {
    const int64_t length = std::max(of.input_size[i], of.output_size[i]) + of.kernel_size[i] - 1;
    while (side < length) side *= 2;
  }
  return side <= kMostFourier ? fourier_bytes(of, side, 1, 1) : 0;
}

struct Estimate {
  int64_t num_bytes;
  Note note;
};

// Of the plans that come first.
Estimate usual_workspace(const Convolution& of, Pass pass) {
  const int64_t in = of.to_vectors(of.inputs), out = of.to_vectors(of.outputs);
  const int64_t num_weights = of.num_weights(in, out);
  const int64_t copies = (of.num_of_images(in, out) + num_weights) * of.element_bytes;
  const bool is_pointwise = are_all(of.kernel_size, 1) && !of.has_steps;
  if (!of.has_tensor_cores) {
    if (of.has_steps || is_pointwise || of.groups > 1 || of.kernel_size.size() != 2) {
      return {pass == Pass::kForward ? 0 : copies, Note::kOfLayout};
    }
    return {std::max(winograd_bytes(of), tiled_fourier_bytes(of, 2) + copies), Note::kWorkspace};
  }
  const int64_t at_once = Machine::get().settings().num_multiprocessors * kSumsOfBlock;
  int64_t sums = std::min(at_once, kMostSplits * num_weights);
  if (pass == Pass::kWeight) sums = std::max(sums, 2 * num_weights);
  sums *= kFloatBytes;
  const bool are_vectors = in == of.inputs && out == of.outputs;
  if (of.is_last) {
    const int64_t of_weights = pass == Pass::kInput ? num_weights * of.element_bytes : 0;
    return {sums + (are_vectors ? of_weights : copies), Note::kWorkspace};
  }
  const bool are_rows = is_pointwise &&
                        c10::multiply_integers(of.output_size) % kChannelsTogether == 0 &&
                        are_vectors;
  if (are_rows) return {sums, Note::kWorkspace};
  return {sums + copies, Note::kOfLayout};
}

int64_t workspace_of_trial(const Convolution& of, int64_t least) {
  if (of.has_steps || of.groups > 1 || of.kernel_size.size() != 2) return least;
  const int64_t transformed = std::max(whole_fourier_bytes(of), tiled_fourier_bytes(of, 1));
  const int64_t num_floats =
      of.num_of_images(of.inputs, of.outputs) + of.num_weights(of.inputs, of.outputs);
  return std::max(least, transformed + kCopiesOfTrial * num_floats * kFloatBytes);
}

// As torch's cache of plans, of a thread.
bool is_first_of_shape(const Convolution& of, Pass pass) {
  thread_local std::set<std::vector<int64_t>> known;
  std::vector<int64_t> shape{static_cast<int64_t>(pass),
                             of.batch,
                             of.groups,
                             of.element_bytes,
                             of.inputs,
                             of.outputs,
                             of.has_steps,
                             of.is_last};
  for (const auto* sizes : {&of.input_size, &of.output_size, &of.kernel_size}) {
    shape.insert(shape.end(), sizes->begin(), sizes->end());
  }
  return known.insert(std::move(shape)).second;
}

void note_workspace(Note note, int64_t num_bytes) {
  if (num_bytes <= 0) return;
  const StreamId stream = Machine::current_stream();
  Machine::get().with_allocator([&](CachingAllocator& allocator) {
    allocator.journal().add_note(note, num_bytes, allocator.reserved_bytes(), stream);
  });
}

// Beside its results, of which some bytes are made later.
void note_pass(const Convolution& of, Pass pass, int64_t later_bytes) {
  const Estimate estimate = usual_workspace(of, pass);
  if (at::globalContext().benchmarkCuDNN() && is_first_of_shape(of, pass)) {
    note_workspace(Note::kOfTrial, workspace_of_trial(of, estimate.num_bytes) - later_bytes);
    if (at::native::_cudnn_get_conv_benchmark_empty_cache()) Machine::get().empty_cache();
  }
  note_workspace(estimate.note, estimate.num_bytes - later_bytes);
}

// What torch makes to have all operands in the layout of those that have the channels last.
Held in_layout(const Convolution& of, const Tensor& tensor) {
  const auto format = !of.is_last         ? at::MemoryFormat::Contiguous
                      : tensor.dim() == 4 ? at::MemoryFormat::ChannelsLast
                                          : at::MemoryFormat::ChannelsLast3d;
  return Held(tensor.is_contiguous(format) ? 0 : static_cast<int64_t>(tensor.nbytes()));
}

struct Operands {
  const Tensor &input, &weight, &result;
};

// The arguments from the stride on are the same in both passes.
Convolution described(const Operands& of, c10::ArrayRef<IValue> from_stride) {
  const bool is_transposed = from_stride[3].toBool();
  const Tensor& first = is_transposed ? of.result : of.input;
  const Tensor& second = is_transposed ? of.input : of.result;
  const int64_t capability = Machine::get().settings().capability;
  const bool is_float = of.input.scalar_type() == c10::kFloat;
  Convolution made;
  made.batch = of.input.size(0);
  made.groups = from_stride[5].toInt();
  made.element_bytes = static_cast<int64_t>(of.input.element_size());
  made.inputs = first.size(1);
  made.outputs = second.size(1);
  made.input_size = first.sizes().slice(2).vec();
  made.output_size = second.sizes().slice(2).vec();
  made.kernel_size = of.weight.sizes().slice(2).vec();
  made.has_steps =
      !are_all(from_stride[0].toIntVector(), 1) || !are_all(from_stride[2].toIntVector(), 1);
  made.is_last = is_last(of.input) || is_last(of.weight);
  made.has_tensor_cores =
      capability >= (is_float ? 80 : 70) && (!is_float || at::globalContext().allowTF32CuDNN());
  return made;
}

// (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
void note_forward(c10::ArrayRef<IValue> arguments, c10::ArrayRef<IValue> results) {
  const Operands of{arguments[0].toTensor(), arguments[1].toTensor(), results[0].toTensor()};
  if (!Machine::get().settings().workspaces) return;
  const Convolution made = described(of, arguments.slice(3));
  const Held input = in_layout(made, of.input);
  const Held weight = in_layout(made, of.weight);
  const bool is_transposed = arguments[6].toBool();
  if (is_without_cudnn(made, of.input.scalar_type(), is_transposed)) return;
  note_pass(made, is_transposed ? Pass::kInput : Pass::kForward, 0);
}

// (grad_output, input, weight, bias_sizes, stride, .., output_mask) -> (input, weight, bias)
void note_backward(c10::ArrayRef<IValue> arguments, c10::ArrayRef<IValue> results) {
  const Tensor& gradient = arguments[0].toTensor();
  const Operands of{arguments[1].toTensor(), arguments[2].toTensor(), gradient};
  if (!Machine::get().settings().workspaces) return;
  const Convolution made = described(of, arguments.slice(4));
  const bool is_transposed = arguments[7].toBool();
  const auto bytes_of = [&](size_t i) {
    const Tensor result = results[i].isTensor() ? results[i].toTensor() : Tensor();
    return result.defined() ? static_cast<int64_t>(result.nbytes()) : -1;
  };
  const int64_t of_input = bytes_of(0), of_weight = bytes_of(1), of_bias = bytes_of(2);
  if (!is_without_cudnn(made, of.input.scalar_type(), is_transposed)) {
    const Held output = in_layout(made, gradient);
    const Held input = in_layout(made, of.input);
    const int64_t later = std::max<int64_t>(0, of_bias);
    if (of_input >= 0) {
      const Held weight = in_layout(made, of.weight);
      note_pass(made, is_transposed ? Pass::kForward : Pass::kInput,
                std::max<int64_t>(0, of_weight) + later);
    }
    if (of_weight >= 0) note_pass(made, Pass::kWeight, later);
  }
  if (of_bias < 0) return;
  std::vector<int64_t> dims{0};
  for (const auto i : c10::irange<int64_t>(2, gradient.dim())) dims.push_back(i);
  Tensor bias = results[2].toTensor();
  as_device_work([&] { at::sum_out(bias, gradient, dims); });  // for the buffers that this takes
}

}  // namespace

NoteConvolution convolution_note(const std::string& name) {
  if (name == "aten::convolution") return &note_forward;
  return name == "aten::convolution_backward" ? &note_backward : nullptr;
}

}  // namespace sim
