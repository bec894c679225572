// The caching allocator: CUDA's rules for segments, splitting, reuse and release, over any source
// of memory. Of torch it uses the thresholds, the settings and the statistics record, so that
// `memory_stats()` has torch's own keys; it knows nothing of tensors, locks or queued work.
//
// Source of the rules: c10/cuda/CUDACachingAllocator.cpp. tests/sim/test_allocator_traces.py
// replays traces of real CUDA runs through this class and demands the recorded addresses.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "streams.h"

namespace sim {

using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;

// Where segments come from, and what must happen before one goes back.
struct MemorySource {
  virtual ~MemorySource() = default;
  virtual char* reserve(size_t num_bytes) = 0;  // nullptr when there is no room
  virtual void release(char* segment, size_t num_bytes) = 0;
  virtual void before_release() = 0;  // cudaFree waits for the device; so does this
};

struct Block;

// Free blocks of one size class, ordered for best fit: same stream, least size, least address.
struct BlockOrder {
  bool operator()(const Block* a, const Block* b) const;
};

struct Pool {
  using FreeBlocks = std::set<Block*, BlockOrder>;

  bool is_small;
  FreeBlocks free_blocks;
  FreeBlocks::node_type spare = {};  // of the last block taken, for the next one put back

  void put(Block* block);
  void take(Block* block) { take(free_blocks.find(block)); }
  void take(FreeBlocks::iterator position) { spare = free_blocks.extract(position); }
};

struct Block {
  Block(StreamId stream, char* address, size_t size, Pool* pool)
      : stream(stream), address(address), size(size), pool(pool) {}

  StreamId stream;
  char* address;
  size_t size;  // rounded, and with the remainder that was too small to split off
  Pool* pool;
  size_t requested = 0;
  bool is_allocated = false;
  bool is_poisoned = false;  // its bytes hold the pattern already (memory.h)
  int num_pending_uses = 0;  // record_stream uses that have not been reached
  Block* before = nullptr;   // neighbours in the same segment
  Block* after = nullptr;
  uint64_t used_by = 0;  // record_stream: one bit a stream

  bool is_free() const { return !is_allocated && num_pending_uses == 0; }
  bool is_whole_segment() const { return !before && !after; }
};

class CachingAllocator {
 public:
  explicit CachingAllocator(MemorySource& source) : source_(source) {}

  static size_t round_size(size_t num_bytes);
  static size_t segment_size(size_t rounded_bytes);

  // Returns nullptr when neither the cache nor the source has room, also after the cache was
  // flushed.
  Block* allocate(size_t num_bytes, StreamId stream);
  // The first half of a free: the block stops being allocated. `finish_free` makes it reusable.
  void begin_free(Block* block);
  void finish_free(Block* block);
  void free(Block* block) { begin_free(block), finish_free(block); }
  // Releases every segment that is wholly free.
  void empty_cache();

  Block* find(const void* address) const;    // the allocated block that starts there, or nullptr
  bool contains(const void* address) const;  // in any allocated block; looks through them all
  size_t reserved_bytes() const { return reserved_bytes_; }
  size_t allocated_bytes() const;
  DeviceStats& stats() { return stats_; }

  // Lays out a segment as it is known to have been; `requested` is 0 for a free block.
  struct Layout {
    size_t size;
    size_t requested;
  };
  void adopt_segment(char* address, size_t num_bytes, bool is_small,
                     const std::vector<Layout>& blocks);

 private:
  Pool& pool_for(size_t rounded_bytes);
  Block* take_cached(Pool& pool, size_t rounded_bytes, StreamId stream);
  Block* take_segment(Pool& pool, size_t segment_bytes, StreamId stream);
  Block* take_oversized_segment(Pool& pool, size_t segment_bytes, StreamId stream);
  Block* hand_out(Block* block, size_t rounded_bytes, size_t requested, bool cut);
  Block* split(Block* block, size_t rounded_bytes);
  bool should_split(const Block* block, size_t rounded_bytes) const;
  size_t absorb(Block* block, Block* neighbour);
  Block* count_segment(Pool& pool, char* address, size_t num_bytes, StreamId stream);
  void release_segment(Block* block);
  void release_free_segments(Pool& pool);

  MemorySource& source_;
  Pool small_{true};
  Pool large_{false};
  ska::flat_hash_map<const void*, Block*> allocated_;
  size_t reserved_bytes_ = 0;
  DeviceStats stats_;
};

}  // namespace sim
