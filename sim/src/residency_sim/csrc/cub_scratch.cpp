#include "cub_scratch.h"

#include <algorithm>
#include <array>
#include <initializer_list>

namespace sim {
namespace {

constexpr int64_t kAlignment = 256;

// AliasTemporaries in cub/util_device.cuh.
int64_t add_up(std::initializer_list<int64_t> parts) {
  int64_t total = kAlignment - 1;
  for (const int64_t part : parts) total += to_multiple(part, kAlignment);
  return total;
}

// Items of a tile. Of compute capability 8 that of 8.0 is tuned; of those above 10 there is none.
struct Tiles {
  int64_t of_80, of_others, of_90, of_100;

  int64_t on(int64_t capability) const {
    if (capability >= 100) return of_100;
    if (capability >= 90) return of_90;
    return capability == 80 ? of_80 : of_others;
  }
};

// RegBoundScaling and MemBoundScaling in cub/util_arch.cuh: longer items are fewer.
int64_t scaled(int64_t num_items, int64_t item_bytes) {
  return std::max<int64_t>(1, num_items * 4 / std::max<int64_t>(4, item_bytes));
}

// cub/agent/single_pass_scan_operators.cuh: a state for each tile and for the 32 before the first.
int64_t states(int64_t num_items, int64_t tile) { return divide_up(num_items, tile) + 32; }

// ScanTileState::AllocationSize: the states, twice what is summed, are added up for themselves.
int64_t states_bytes(int64_t num_items, int64_t tile, int64_t item_bytes) {
  return add_up({states(num_items, tile) * 2 * item_bytes});
}

// ------------------------------------------------------------------------------------------ sorts

// sm90_small_key_tuning, with offsets of 64 bits: for keys of one and two bytes, with values of 0,
// 1, 2, 4, 8 and 16 bytes. sm100_small_key_tuning differs in those that follow.
struct Tile {
  int64_t value_bytes, threads, items;
};
constexpr std::array<std::array<Tile, 6>, 2> kSmallKeys90{{
    {{{0, 512, 19}, {1, 448, 16}, {2, 512, 14}, {4, 512, 14}, {8, 384, 18}, {16, 512, 22}}},
    {{{0, 512, 19}, {1, 384, 16}, {2, 448, 16}, {4, 512, 12}, {8, 512, 23}, {16, 576, 22}}},
}};
constexpr std::array<std::array<Tile, 6>, 2> kSmallKeys100{{
    {{{0, 512, 19}, {1, 384, 20}, {2, 256, 22}, {4, 384, 15}, {8, 384, 18}, {16, 512, 22}}},
    {{{0, 384, 20}, {1, 384, 15}, {2, 576, 15}, {4, 512, 18}, {8, 512, 23}, {16, 576, 22}}},
}};

// Items of a tile of one sweep, or 0 where sorts take several (tuning_radix_sort.cuh).
int64_t swept_tile(int64_t capability, int64_t key_bytes, int64_t value_bytes) {
  constexpr int64_t kThreads = 384, kLeastKey = 4;
  const int64_t item_bytes = std::max(key_bytes, value_bytes);
  if (capability < 90) {
    if (key_bytes < kLeastKey) return 0;
    return kThreads * scaled(key_bytes == 4 && value_bytes > 0 ? 17 : 21, item_bytes);
  }
  if (key_bytes < kLeastKey) {
    const auto& tiles = (capability >= 100 ? kSmallKeys100 : kSmallKeys90)[key_bytes - 1];
    const auto found = std::find_if(tiles.begin(), tiles.end(), [&](const Tile& tile) {
      return tile.value_bytes >= value_bytes;
    });
    return found->threads * scaled(found->items, item_bytes);
  }
  if (key_bytes == 4) {
    const int64_t items = value_bytes == 0 ? 19 : value_bytes < 8 ? 17 : 29;
    return kThreads * scaled(items, item_bytes);
  }
  return kThreads * scaled(value_bytes < 8 ? 30 : 24, item_bytes);
}

}  // namespace

// DispatchRadixSort with offsets of 64 bits, as torch calls it: a single tile of 256 threads with
// 19 four-byte items each, or one sweep for each eight bits. Keys of one or two bytes before
// compute capability 9 take some more, which follows from how many blocks the device can hold.
int64_t sort_scratch_bytes(int64_t capability, int64_t num_keys, int64_t num_bits,
                           int64_t key_bytes, int64_t value_bytes) {
  constexpr int64_t kDigits = 256, kBitsOfPass = 8;
  if (num_keys <= 256 * scaled(19, std::max(key_bytes, value_bytes))) return 1;
  const int64_t num_passes = divide_up(num_bits, kBitsOfPass);
  const int64_t tile = swept_tile(capability, key_bytes, value_bytes);
  const int64_t num_copied = num_passes > 1 ? num_keys : 0;
  return add_up({
      tile ? num_passes * kDigits * kInt64Bytes : 0,               // counts
      tile ? divide_up(num_keys, tile) * kDigits * kIntBytes : 0,  // of tiles
      num_copied * key_bytes,
      num_copied * value_bytes,
      tile ? num_passes * kIntBytes : 0,
  });
}

// DispatchSegmentedRadixSort: keys and values again.
int64_t segmented_sort_scratch_bytes(int64_t num_keys, int64_t key_bytes, int64_t value_bytes) {
  return add_up({num_keys * key_bytes, num_keys * value_bytes});
}

// ------------------------------------------------------------------------------------------ scans

// DispatchScan. Of a type of torch's own a word and two sums are kept for each tile, apart.
int64_t scan_scratch_bytes(int64_t capability, int64_t num_items, int64_t item_bytes) {
  constexpr int64_t kHalfBytes = 2, kTileOfHalves = 128 * 30;
  if (item_bytes == kHalfBytes) {
    const int64_t num_states = states(num_items, kTileOfHalves);
    const int64_t sums_bytes = num_states * kHalfBytes;
    return add_up({add_up({num_states * kIntBytes, sums_bytes, sums_bytes})});
  }
  const Tiles of_long{288 * 11, 128 * 7, 224 * 12, 320 * 11};
  const Tiles of_int{320 * 12, 128 * 15, 128 * 24, 416 * 19};
  const int64_t tile = (item_bytes == 8 ? of_long : of_int).on(capability);
  return add_up({states_bytes(num_items, tile, item_bytes)});
}

// DispatchScanByKey: ReduceByKeyScanTileState is of sixteen bytes, and the key before each tile is
// kept.
int64_t scan_by_key_scratch_bytes(int64_t capability, int64_t num_items) {
  const int64_t tile = Tiles{256 * 15, 256 * 9, 288 * 14, 224 * 20}.on(capability);
  return add_up({states(num_items, tile) * 16, (divide_up(num_items, tile) + 1) * kIntBytes});
}

// DispatchSelectIf, which counts in 32 bits.
int64_t select_scratch_bytes(int64_t capability, int64_t num_items) {
  const int64_t tile = Tiles{384 * 6, 128 * 5, 384 * 11, 320 * 11}.on(capability);
  return add_up({states_bytes(num_items, tile, kIntBytes)});
}

// DispatchUniqueByKey, which counts in 64.
int64_t unique_by_key_scratch_bytes(int64_t capability, int64_t num_items, int64_t key_bytes) {
  const Tiles of_long{192 * 7, 64 * 5, 448 * 11, 576 * 7};
  const Tiles of_int{256 * 11, 64 * 11, 512 * 14, 512 * 14};
  const int64_t tile = (key_bytes == 8 ? of_long : of_int).on(capability);
  return add_up({states_bytes(num_items, tile, kInt64Bytes)});
}

// DispatchReduce of four-byte counts: one tile of 256 x 16 alone needs nothing, else a count for
// each of five times the blocks of 256 threads that the device holds.
int64_t sum_scratch_bytes(int64_t num_items, int64_t num_multiprocessors,
                          int64_t threads_per_multiprocessor) {
  constexpr int64_t kThreads = 256, kItems = 16, kSubscription = 5;
  if (num_items <= kThreads * kItems) return 1;
  const int64_t num_blocks = num_multiprocessors * (threads_per_multiprocessor / kThreads);
  return add_up({num_blocks * kSubscription * kIntBytes});
}

}  // namespace sim
