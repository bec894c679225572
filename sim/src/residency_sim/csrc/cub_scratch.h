// Bytes of scratch that cub's algorithms ask for on a card of a compute capability (90 for 9.0), by
// the headers of CCCL 3.0 (CUDA 13.0): cub/device/dispatch, and its folder `tuning` for the tiles.
#pragma once

#include <cstdint>

namespace sim {

constexpr int64_t kInt64Bytes = sizeof(int64_t);
constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kIntBytes = sizeof(int32_t);

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t to_multiple(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Keys by `num_bits` bits, each with a value (of no bytes: keys alone).
int64_t sort_scratch_bytes(int64_t capability, int64_t num_keys, int64_t num_bits,
                           int64_t key_bytes, int64_t value_bytes);

// Rows of keys, each sorted by itself.
int64_t segmented_sort_scratch_bytes(int64_t num_keys, int64_t key_bytes, int64_t value_bytes);

// A running sum of whole numbers or floats; half precision is no type of the language.
int64_t scan_scratch_bytes(int64_t capability, int64_t num_items, int64_t item_bytes);

// A running sum within equal keys of four bytes, of four bytes each.
int64_t scan_by_key_scratch_bytes(int64_t capability, int64_t num_items);

// Numbers of eight bytes of which a flag is set.
int64_t select_scratch_bytes(int64_t capability, int64_t num_items);

// The first of equal keys, with its value of as many bytes.
int64_t unique_by_key_scratch_bytes(int64_t capability, int64_t num_items, int64_t key_bytes);

// A sum of counts.
int64_t sum_scratch_bytes(int64_t num_items, int64_t num_multiprocessors,
                          int64_t threads_per_multiprocessor);

}  // namespace sim
