#include "workspaces.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <regex>
#include <utility>
#include <vector>

#include "machine.h"

namespace sim {
namespace {

constexpr size_t kKiB = size_t(1) << 10;

// cuBLAS handles belong to threads; that of a thread which has ended goes to the next new one, with
// its workspaces.
struct Handles {
  std::mutex lock;
  std::vector<int> unused;
  int num_made = 0;
  std::map<std::pair<int, StreamId>, void*> workspaces;
};

Handles& handles() {
  static auto* all = new Handles;  // threads may end after every static object of this library
  return *all;
}

struct ThreadHandle {
  ThreadHandle() {
    std::lock_guard<std::mutex> guard(handles().lock);
    if (handles().unused.empty()) {
      number = handles().num_made++;
    } else {
      number = handles().unused.back();
      handles().unused.pop_back();
    }
  }
  ~ThreadHandle() {
    std::lock_guard<std::mutex> guard(handles().lock);
    handles().unused.push_back(number);
  }
  int number = 0;
};

}  // namespace

Held::Held(int64_t num_bytes) {
  if (num_bytes > 0) block_ = Machine::get().allocate(static_cast<size_t>(num_bytes));
}

Held::~Held() {
  if (block_) Machine::get().free(block_);
}

// Source: parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp.
size_t blas_workspace_bytes(const char* config, int capability_major, bool& is_understood) {
  static const std::array<int, 3> with_large_ones{9, 10, 12};
  const bool is_large = std::find(with_large_ones.begin(), with_large_ones.end(),
                                  capability_major) != with_large_ones.end();
  const size_t otherwise = is_large ? 8 * 4096 * kKiB : (2 * 4096 + 8 * 16) * kKiB;
  is_understood = true;
  if (!config) return otherwise;
  static const std::regex part(":([0-9]+):([0-9]+)");
  const std::string text(config);
  std::sregex_iterator next(text.begin(), text.end(), part);
  is_understood = next != std::sregex_iterator();
  if (!is_understood) return otherwise;
  size_t total = 0;
  for (; next != std::sregex_iterator(); ++next) {
    total += std::stoull(next->str(1)) * kKiB * std::stoull(next->str(2));
  }
  return total;
}

void use_blas() {
  Machine& machine = Machine::get();
  const size_t num_bytes = machine.settings().blas_workspace_bytes;
  if (num_bytes == 0) return;
  thread_local ThreadHandle handle;
  const auto key = std::make_pair(handle.number, Machine::current_stream());
  {
    std::lock_guard<std::mutex> guard(handles().lock);
    if (handles().workspaces.count(key)) return;
  }
  void* workspace = machine.allocate(num_bytes);  // takes the machine's lock, and may throw
  std::lock_guard<std::mutex> guard(handles().lock);
  handles().workspaces.emplace(key, workspace);
}

std::vector<void*> blas_workspaces() {
  std::lock_guard<std::mutex> guard(handles().lock);
  std::vector<void*> addresses;
  for (const auto& [_, workspace] : handles().workspaces) addresses.push_back(workspace);
  return addresses;
}

void clear_blas_workspaces() {
  std::map<std::pair<int, StreamId>, void*> cleared;
  {
    std::lock_guard<std::mutex> guard(handles().lock);
    cleared.swap(handles().workspaces);
  }
  for (const auto& [_, workspace] : cleared) Machine::get().free(workspace);
}

// ------------------------------------------------------------------------------------- reductions

namespace {

int64_t last_power_of_2(int64_t n) {
  return n <= 1 ? 1 : int64_t(1) << (63 - __builtin_clzll(static_cast<uint64_t>(n)));
}

}  // namespace

// Source: setReduceConfig in aten/src/ATen/native/cuda/Reduce.cuh, with its defaults: four values a
// load, at least 16 and at most 256 values a thread.
ReductionScratch scratch_of(const Reduction& r, int64_t num_multiprocessors,
                            int64_t threads_per_multiprocessor) {
  constexpr int64_t kWarp = 32, kVector = 4, kLeastValues = 16, kMostValues = 256;
  const bool has_dims = r.num_dims > 0;
  const bool reduces_fastest = !has_dims || r.num_reduced_dims == r.num_dims ||
                               r.fastest_stride_bytes < r.fastest_kept_stride_bytes;
  int64_t width = !has_dims ? 1 : reduces_fastest ? r.inputs_per_output : r.num_outputs;
  int64_t height = !has_dims ? 1 : reduces_fastest ? r.num_outputs : r.inputs_per_output;
  const int64_t stride = !has_dims         ? r.element_bytes
                         : reduces_fastest ? r.fastest_stride_bytes
                                           : r.fastest_kept_stride_bytes;
  int64_t output_vector = 1;
  if (stride == r.element_bytes) {
    if (reduces_fastest && width > 128 && r.num_dims == 1) {
      width /= kVector;
    } else if (!reduces_fastest) {
      output_vector = r.output_alignment;
      width /= output_vector;
    }
  }

  const int64_t max_threads = r.max_threads / output_vector;
  const int64_t widest = std::min(last_power_of_2(width), max_threads);
  const int64_t highest = std::min(last_power_of_2(height), max_threads);
  int64_t block_width = std::min(widest, kWarp);
  const int64_t block_height = std::min(highest, max_threads / block_width);
  block_width = std::min(widest, max_threads / block_height);

  int64_t input_step = 1;
  int64_t output_step = 1;
  const auto values_per_thread = [&] { return divide_up(r.inputs_per_output, input_step); };
  (reduces_fastest ? input_step : output_step) *= block_width;
  const bool splits_warps =
      values_per_thread() >= std::min(block_height * kLeastValues, kMostValues);
  (splits_warps ? input_step : output_step) *= block_height;

  const int64_t blocks_per_multiprocessor =
      threads_per_multiprocessor / (block_width * block_height);
  const int64_t wanted_blocks = num_multiprocessors * blocks_per_multiprocessor;
  const int64_t num_blocks = divide_up(r.num_outputs / output_vector, output_step);
  if (!splits_warps || values_per_thread() < kMostValues || num_blocks > wanted_blocks) return {};
  const int64_t blocks_per_output = std::max(
      std::min(divide_up(wanted_blocks, num_blocks), divide_up(values_per_thread(), kLeastValues)),
      divide_up(values_per_thread(), kMostValues));
  if (blocks_per_output <= 1) return {};
  int64_t num_partial = r.num_outputs * blocks_per_output;
  if (!reduces_fastest) num_partial *= block_width * output_vector;
  return {static_cast<size_t>(num_partial * r.accumulator_bytes),
          static_cast<size_t>(num_blocks) * sizeof(int)};
}

}  // namespace sim
