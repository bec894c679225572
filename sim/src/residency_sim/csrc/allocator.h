// The caching allocator: CUDA's rules for segments, splitting, reuse and release, over any source
// of memory. Of torch it uses the thresholds, the settings and the statistics record, so that
// `memory_stats()` has torch's own keys; it knows nothing of tensors, locks or queued work.
//
// Source of the rules: c10/cuda/CUDACachingAllocator.cpp. tests/sim/test_allocator_traces.py
// replays traces of real CUDA runs through this class and demands the recorded addresses.
//
// The class is in four files: allocator.cpp (segments and blocks), allocator_expandable.cpp
// (segments that grow), allocator_limits.cpp (private pools, memory fraction, garbage collection),
// allocator_snapshot.cpp (what it shows of them).
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "history.h"
#include "journal.h"
#include "streams.h"
#include "torch_versions.h"

namespace sim {

using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;

// Where segments come from, and what must happen before one goes back.
struct MemorySource {
  virtual ~MemorySource() = default;
  virtual size_t capacity_bytes() const = 0;
  virtual char* reserve(size_t num_bytes) = 0;  // nullptr when there is no room
  virtual void release(char* segment, size_t num_bytes) = 0;
  // cudaFree waits for the device; so does this. Other threads may use the allocator meanwhile.
  virtual void synchronize_memory() = 0;
  virtual void finish_pending_frees() = 0;  // of blocks that other streams have used

  // Addresses with no memory behind them, into which memory is mapped piece by piece.
  virtual char* reserve_addresses(size_t num_bytes) = 0;
  virtual void release_addresses(char* address, size_t num_bytes) = 0;
  virtual bool map(char* address, size_t num_bytes) = 0;  // false, and nothing, without room
  virtual void unmap(char* address, size_t num_bytes) = 0;
};

struct Block;
struct PrivatePool;

// Free blocks of one size class, ordered for best fit: same stream, least size, least address.
struct BlockOrder {
  bool operator()(const Block* a, const Block* b) const;
};

// Unmapped blocks, ordered for the least address that can grow: same stream, least address.
struct AddressOrder {
  bool operator()(const Block* a, const Block* b) const;
};

struct Pool {
  using FreeBlocks = std::set<Block*, BlockOrder>;

  bool is_small;
  PrivatePool* owner = nullptr;
  FreeBlocks free_blocks = {};
  FreeBlocks::node_type spare = {};  // of the last block taken, for the next one put back
  std::set<Block*, AddressOrder> unmapped = {};
  int64_t num_searches = 0;  // counted only while garbage may be collected, which goes by age

  void put(Block* block);
  void take(Block* block) { take(free_blocks.find(block)); }
  void take(FreeBlocks::iterator position) { spare = free_blocks.extract(position); }
};

// A range of addresses that memory is mapped into, in granules of one size.
struct ExpandableSegment {
  char* address;
  size_t size;
  size_t granule;
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
  bool is_poisoned = false;  // its bytes hold the pattern already (machine.h)
  int num_pending_uses = 0;  // record_stream uses that have not been reached
  Block* before = nullptr;   // neighbours in the same segment
  Block* after = nullptr;
  uint64_t used_by = 0;  // record_stream: one bit a stream
  ExpandableSegment* expandable = nullptr;
  bool is_mapped = true;        // false: addresses without memory, of an expandable segment
  int64_t searches_before = 0;  // of its pool, when it became free
  Stack stack;                  // of the call that it was handed out to
  Stack segment_stack;          // of the call that reserved the segment, which begins here

  bool is_free() const { return !is_allocated && num_pending_uses == 0; }
  bool is_whole_segment() const { return !before && !after; }
};

// A pool of segments for some allocations only, such as a graph's. Its memory goes back when the
// pool is not used any more.
struct PrivatePool {
  explicit PrivatePool(PoolId id) : id(id), small{true, this}, large{false, this} {}
  PoolId id;
  int num_users = 1;
  size_t reserved_bytes = 0;
  Pool small;
  Pool large;
};

inline PoolId id_of(const Pool& pool) { return pool.owner ? pool.owner->id : PoolId{0, 0}; }

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
  // Releases every segment, and every mapped granule, that is wholly free: those of the default
  // pool, unless allocations are being directed to a private one, and of private pools that have no
  // user; or those of one such private pool alone.
  void empty_cache(PoolId only = {0, 0});

  // This process may reserve that share of the capacity; 1 for all of it.
  void set_memory_fraction(double fraction);
  double memory_fraction() const { return fraction_.value_or(1.0); }
  std::optional<size_t> allowed_bytes() const;

  // A private pool comes with its first user and goes, with its memory, after its last.
  void add_pool_user(PoolId id);
  void remove_pool_user(PoolId id);
  int num_pool_users(PoolId id) const;
  // From here on, allocations for which `takes` is true come from the pool; the latest call first.
  void begin_allocating_to(PoolId id, std::function<bool(StreamId)> takes);
  void end_allocating_to(PoolId id);
  size_t free_bytes_in_private_pools() const;

  // A segment with its blocks as they are now; of one that grows, a run of mapped granules.
  struct Segment {
    PoolId pool;  // {0, 0}: the default one
    bool is_small;
    std::vector<Block> blocks;
  };
  // All of them by address, or those of one private pool. `draining` are the blocks between the
  // halves of a free.
  std::vector<Segment> segments(const std::vector<const Block*>& draining, PoolId only);

  History& history() { return history_; }
  Journal& journal() { return journal_; }
  void note_out_of_memory(size_t num_bytes, StreamId stream, size_t free_bytes);

  Block* find(const void* address) const;    // the allocated block that starts there, or nullptr
  bool contains(const void* address) const;  // in any allocated block; looks through them all
  size_t reserved_bytes() const { return reserved_bytes_; }
  size_t allocated_bytes() const;
  DeviceStats& stats() { return stats_; }
  PoolFigures& pool_figures() { return pool_figures_; }  // bytes reserved by private pools

  // Lays out a segment as it is known to have been; `requested` is 0 for a free block.
  struct Layout {
    size_t size;
    size_t requested;
  };
  void adopt_segment(char* address, size_t num_bytes, bool is_small,
                     const std::vector<Layout>& blocks);

 private:
  struct Request {
    Pool& pool;
    size_t rounded_bytes;
    size_t segment_bytes;
    StreamId stream;
    bool expands;  // may take from segments that grow, and gets new memory from them alone
  };

  Pool& pool_for(size_t rounded_bytes, StreamId stream);
  void note(Action action, const Block* block, const void* address, size_t num_bytes,
            const Stack& otherwise = {});
  void count_reserved(Pool& pool, int64_t difference);
  Block* take_cached(const Request& request);
  Block* take_new(const Request& request);
  Block* take_segment(const Request& request);
  bool release_oversized_segments(const Request& request);
  Block* hand_out(Block* block, size_t rounded_bytes, size_t requested, bool cut);
  Block* split(Block* block, size_t rounded_bytes);
  bool should_split(const Block* block, const Request& request) const;
  size_t absorb(Block* block, Block* neighbour);
  Block* count_segment(Pool& pool, char* address, size_t num_bytes, StreamId stream);
  void release_segment(Block* block);
  void release_free_memory(Pool& pool);

  // allocator_expandable.cpp
  Pool::FreeBlocks::iterator best_expandable(Pool& pool, Pool::FreeBlocks::iterator fit,
                                             StreamId stream) const;
  Block* take_expandable(const Request& request);
  Block* find_addresses(const Request& request);
  Block* map_block(Block* block, size_t num_bytes);
  void unmap_block(Block* block);
  void release_addresses(Block* block);

  // allocator_limits.cpp
  bool collects_garbage() const;
  void collect_garbage();
  void release_unused_pools(PoolId only);

  MemorySource& source_;
  Pool small_{true};
  Pool large_{false};
  ska::flat_hash_map<const void*, Block*> allocated_;
  size_t reserved_bytes_ = 0;
  DeviceStats stats_;
  PoolFigures pool_figures_;
  History history_;
  Journal journal_;
  std::optional<double> fraction_;
  std::map<PoolId, std::unique_ptr<PrivatePool>> private_pools_;
  std::vector<std::pair<PoolId, std::function<bool(StreamId)>>> directed_;  // the latest last
};

// Statistics are kept three times: for both pools together and for each alone.
template <class Update>
void count(const Pool& pool, Update update) {
  using c10::CachingAllocator::StatType;
  update(static_cast<size_t>(StatType::AGGREGATE));
  update(static_cast<size_t>(pool.is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL));
}

inline void adjust(c10::CachingAllocator::Stat& stat, int64_t difference) {
  if (difference > 0) stat.increase(static_cast<size_t>(difference));
  if (difference < 0) stat.decrease(static_cast<size_t>(-difference));
}

inline size_t round_up(size_t num_bytes, size_t multiple) {
  return (num_bytes + multiple - 1) / multiple * multiple;
}

}  // namespace sim
