// Scratch memory that CUDA's libraries and kernels take from torch's allocator: the workspace of
// cuBLAS, the buffers of reductions that are split over blocks. Off where settings say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cub_scratch.h"

namespace sim {

// Device memory of a kernel, for as long as this lives; none where it has no bytes.
class Held {
 public:
  explicit Held(int64_t num_bytes);
  Held(Held&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  Held& operator=(Held&& other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Held();

 private:
  void* block_ = nullptr;
};

// Bytes of one cuBLAS workspace by the rule of torch: `config` is CUBLAS_WORKSPACE_CONFIG, with any
// number of `:KiB:count` in it, or nullptr. Sets `is_understood` to false, and takes the default,
// where there is none.
size_t blas_workspace_bytes(const char* config, int capability_major, bool& is_understood);

// From the first call on, the current thread's cuBLAS handle has a workspace for the current
// stream. It is kept until all are cleared.
void use_blas();
std::vector<void*> blas_workspaces();
void clear_blas_workspaces();

// One reduction by a kernel of torch's Reduce.cuh, its dimensions as torch's TensorIterator orders
// and joins them: those reduced first, each group from the fastest to the slowest.
struct Reduction {
  int64_t num_dims = 0;
  int64_t num_reduced_dims = 0;
  int64_t num_outputs = 1;
  int64_t inputs_per_output = 1;
  int64_t fastest_stride_bytes = 0;  // of the input
  int64_t fastest_kept_stride_bytes = 0;
  int64_t output_alignment = 4;   // what divides address, first kept size and strides, up to 4
  int64_t element_bytes = 0;      // of the input
  int64_t accumulator_bytes = 0;  // of one partial result
  int64_t max_threads = 512;
};

struct ReductionScratch {
  size_t buffer_bytes = 0;  // both 0 where the reduction is not split over blocks
  size_t semaphore_bytes = 0;
};

// On a device of so many multiprocessors, each of so many threads.
ReductionScratch scratch_of(const Reduction& reduction, int64_t num_multiprocessors,
                            int64_t threads_per_multiprocessor);

}  // namespace sim
