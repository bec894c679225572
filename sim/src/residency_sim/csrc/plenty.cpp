#include "plenty.h"

#include <algorithm>

namespace sim {

void Plenty::read(const Journal::Entry* entries, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const Journal::Entry& entry = entries[i];
    const auto note = static_cast<Journal::Note>(entry.address);
    const bool is_trial = entry.num_bytes == 0 && note == Journal::Note::kOfTrial;
    peaks_.num_trials += is_trial;
    if (entry.num_bytes > 0) {
      blocks_[entry.address] =
          allocator_.allocate(static_cast<size_t>(entry.requested), entry.stream);
      raises_peaks();
    } else if (entry.num_bytes < 0) {
      const auto found = blocks_.find(entry.address);
      if (found == blocks_.end()) continue;  // of a process that was forked: its parent's
      allocator_.free(found->second);
      blocks_.erase(found);
    } else if (note == Journal::Note::kEmptied) {
      allocator_.empty_cache();
    } else if (with_trials_ || !is_trial) {
      Block* block = allocator_.allocate(static_cast<size_t>(entry.requested), entry.stream);
      if (raises_peaks()) {
        peaks_.note = note;
        peaks_.num_bytes = entry.requested;
      }
      allocator_.free(block);
    }
  }
}

bool Plenty::raises_peaks() {
  const auto allocated = static_cast<int64_t>(allocator_.allocated_bytes());
  const auto reserved = static_cast<int64_t>(allocator_.reserved_bytes());
  const bool raises = allocated > peaks_.allocated || reserved > peaks_.reserved;
  peaks_.allocated = std::max(peaks_.allocated, allocated);
  peaks_.reserved = std::max(peaks_.reserved, reserved);
  return raises;
}

char* Plenty::reserve_addresses(size_t num_bytes) {
  const uintptr_t address = next_;
  next_ += round_up(num_bytes, size_t(2) << 20);
  return reinterpret_cast<char*>(address);
}

}  // namespace sim
