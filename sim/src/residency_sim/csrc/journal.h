// Every block that the allocator handed out or took back, in order, for a reader that adds them up:
// who held how much at the moment of a peak. Kept only while it is on, and then until it is taken.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "streams.h"

namespace sim {

class Journal {
 public:
  // What an entry of no bytes says, in place of an address: that the cache was given back, or that
  // cuDNN would take `requested` for a workspace, where the device has them (torch_convolutions.h).
  enum class Note : int64_t { kEmptied, kWorkspace, kOfLayout, kOfTrial };

  struct Entry {
    int64_t address;
    int64_t num_bytes;  // of the block, as the allocator rounds it; negative when it is let go
    int64_t requested;
    int64_t reserved;  // by the allocator, right after
    int64_t stream;
  };

  void set_on(bool is_on) {
    is_on_ = is_on;
    entries_.clear();
  }
  void add(const void* address, int64_t num_bytes, size_t requested, size_t reserved,
           StreamId stream) {
    if (!is_on_) return;
    entries_.push_back({static_cast<int64_t>(reinterpret_cast<uintptr_t>(address)), num_bytes,
                        static_cast<int64_t>(requested), static_cast<int64_t>(reserved), stream});
  }
  void add_note(Note what, int64_t num_bytes, size_t reserved, StreamId stream) {
    if (!is_on_) return;
    entries_.push_back(
        {static_cast<int64_t>(what), 0, num_bytes, static_cast<int64_t>(reserved), stream});
  }
  std::vector<Entry> take() { return std::exchange(entries_, {}); }

 private:
  bool is_on_ = false;
  std::vector<Entry> entries_;
};

}  // namespace sim
