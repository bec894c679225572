// Pinned host memory: power-of-two blocks, kept for reuse, handed out again only once the copies
// that used them have run. No torch ops in here. Callers hold the machine's lock (machine.h).
//
// Source of the rules: ATen/core/CachingHostAllocator.h (sizes round up to a power of two).
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "streams.h"

namespace sim {

struct HostStatistics {
  size_t used_bytes = 0;
  size_t pinned_bytes = 0;  // used, and kept for reuse
  size_t peak_used_bytes = 0;
  size_t peak_pinned_bytes = 0;
  size_t num_pinned = 0;  // allocations that really pinned memory
};

class HostAllocator {
 public:
  explicit HostAllocator(const Streams& streams) : streams_(streams) {}

  // `is_reused` says that earlier copies used the same bytes, and have all run.
  void* allocate(size_t num_bytes, bool& is_reused);
  void free(void* address);
  void record_use(const void* address, Ticket ticket);
  bool is_pinned(const void* address) const;
  size_t block_size(const void* address) const;
  // What must have run before every block that is kept for reuse can go.
  std::vector<Ticket> uses_of_cache() const;
  void empty_cache();  // releases the blocks kept for reuse whose uses have run
  HostStatistics& statistics() { return statistics_; }

 private:
  struct Block {
    size_t size;
    bool is_used;
    std::vector<Ticket> uses;
  };
  using Blocks = std::map<uintptr_t, Block>;

  Blocks::iterator around(const void* address);
  bool is_quiet(const Block& block) const;

  const Streams& streams_;
  Blocks blocks_;
  HostStatistics statistics_;
};

}  // namespace sim
