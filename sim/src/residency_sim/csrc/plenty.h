// A card of plenty: what the allocator of one would hold and reserve that has the room for each
// workspace that the journal has. It reads what the program's own allocator did.
#pragma once

#include <unordered_map>

#include "allocator.h"

namespace sim {

class Plenty final : MemorySource {
 public:
  // Without trials, a workspace that cuDNN takes once to try a plan is left out.
  explicit Plenty(bool with_trials) : with_trials_(with_trials) {}

  void read(const Journal::Entry* entries, size_t count);

  struct Peaks {
    int64_t allocated, reserved;
    Journal::Note note;  // why the last workspace was taken that raised one of them
    int64_t num_bytes;   // of it; 0 where none has
    int64_t num_trials;
  };
  Peaks peaks() const { return peaks_; }

 private:
  bool raises_peaks();

  char* reserve(size_t num_bytes) override { return reserve_addresses(num_bytes); }
  void release(char*, size_t) override {}
  void synchronize_memory() override {}
  void finish_pending_frees() override {}
  size_t capacity_bytes() const override { return size_t(1) << 42; }
  char* reserve_addresses(size_t num_bytes) override;
  void release_addresses(char*, size_t) override {}
  bool map(char*, size_t) override { return true; }
  void unmap(char*, size_t) override {}

  const bool with_trials_;
  CachingAllocator allocator_{*this};
  std::unordered_map<int64_t, Block*> blocks_;  // by the program's addresses
  uintptr_t next_ = uintptr_t(1) << 40;         // nothing is ever stored there
  Peaks peaks_{};
};

}  // namespace sim
