// Pinned host memory: power-of-two blocks, kept for reuse, handed out again only once the copies
// that used them have run. No torch ops in here. Callers hold the machine's lock (machine.h).
//
// Source of the rules: ATen/core/CachingHostAllocator.h (sizes round up to a power of two; which
// block a copy is recorded for).
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <vector>

#include "streams.h"

namespace sim {

// The figures of torch's own record: blocks and bytes that are pinned (used, or kept for reuse),
// and those that are active (used, or waiting for a copy). Times are not taken.
struct HostStatistics {
  using Stat = c10::CachingAllocator::Stat;
  using DurationStat = c10::CachingAllocator::DurationStat;

  Stat used_bytes;        // by tensors
  Stat registered_bytes;  // of memory of the caller's
  Stat allocations;
  Stat allocated_bytes;
  Stat active_requests;
  Stat active_bytes;
  DurationStat alloc_time;
  DurationStat free_time;

  template <class Apply>
  void for_each(Apply apply) {
    for (Stat* stat : {&used_bytes, &registered_bytes, &allocations, &allocated_bytes,
                       &active_requests, &active_bytes}) {
      apply(*stat);
    }
    for (DurationStat* stat : {&alloc_time, &free_time}) apply(*stat);
  }
};

// The host side of a copy, as torch tells it to the allocator: the tensor's first byte, and the
// context of its storage, which for the allocator's own is the block's address.
struct PinnedUse {
  const void* address = nullptr;
  const void* context = nullptr;
};

size_t physical_memory_bytes();
size_t available_memory_bytes();  // what the system says can still be had without swapping

class HostAllocator {
 public:
  explicit HostAllocator(const Streams& streams) : streams_(streams) {}

  // `is_reused` says that earlier copies used the same bytes, and have all run. `commits` says that
  // all pages of a new block are there when this returns, as with cudaHostAlloc. Returns nullptr
  // for no bytes, and where the host has no room.
  void* allocate(size_t num_bytes, bool commits, bool& is_reused);
  void free(void* address);
  // Returns whether there is such a block: what `use` has is the context of its allocation, or its
  // first byte. A tensor that lies inside, made over the address, is not found.
  bool record_use(PinnedUse use, Ticket ticket);
  bool is_pinned(const void* address) const;
  // Memory of a caller's own that he page-locks. Torch keeps no record of the copies that use it;
  // this one does, so that it is seen when it is let go too early. Both return whether it was done.
  bool add_registered(void* address, size_t num_bytes);
  bool remove_registered(void* address, bool& is_in_use);
  size_t block_size(const void* address) const;
  // What must have run before every block that is kept for reuse can go.
  std::vector<Ticket> uses_of_cache() const;
  void empty_cache();  // releases the blocks kept for reuse whose uses have run
  HostStatistics& statistics() { return statistics_; }

 private:
  struct Block {
    size_t size;
    bool is_used = false;
    bool is_active = false;  // used, or a copy of it has yet to run
    std::vector<Ticket> uses;
  };
  using Blocks = std::map<uintptr_t, Block>;

  static Blocks::iterator around(Blocks& blocks, const void* address);
  static void note_use(Block& block, Ticket ticket);
  bool is_quiet(const Block& block) const;
  Blocks::iterator pin(size_t size, bool commits);
  void retire(Block& block);
  void retire_quiet_blocks();

  const Streams& streams_;
  Blocks blocks_;
  Blocks registered_;
  HostStatistics statistics_;
};

}  // namespace sim
