// What the allocator shows of its memory, block by block, and tells its history.
//
// Source of the rules: c10/cuda/CUDACachingAllocator.cpp, `snapshot` and `record_trace`.
#include <algorithm>

#include "allocator.h"

namespace sim {

std::vector<CachingAllocator::Segment> CachingAllocator::segments(
    const std::vector<const Block*>& draining, PoolId only) {
  std::vector<const Block*> first;
  const auto look = [&](const Block* block) {
    if (!block->before || !block->before->is_mapped) first.push_back(block);
  };
  for (const auto& [_, block] : allocated_) look(block);
  std::for_each(draining.begin(), draining.end(), look);
  std::vector<const Pool*> pools{&small_, &large_};
  for (const auto& [_, owner] : private_pools_) {
    pools.insert(pools.end(), {&owner->small, &owner->large});
  }
  for (const Pool* pool : pools) {
    std::for_each(pool->free_blocks.begin(), pool->free_blocks.end(), look);
  }
  std::sort(first.begin(), first.end(), [](const Block* a, const Block* b) {
    return reinterpret_cast<uintptr_t>(a->address) < reinterpret_cast<uintptr_t>(b->address);
  });
  first.erase(std::unique(first.begin(), first.end()), first.end());

  std::vector<Segment> found;
  size_t active_bytes = 0;
  for (const Block* block : first) {
    const PoolId id = id_of(*block->pool);
    if (only != PoolId{0, 0} && only != id) continue;
    Segment& segment = found.emplace_back(Segment{id, block->pool->is_small, {}});
    for (; block && block->is_mapped; block = block->after) {
      segment.blocks.push_back(*block);
      if (!block->is_free()) active_bytes += block->size;
    }
  }
  if (history_.is_on()) {
    history_.add(Action::kSnapshot, nullptr, active_bytes, kDefaultStream, only, {});
  }
  return found;
}

// ---------------------------------------------------------------------------------------- history

// With the stack of this thread's call; where none is kept of such, with another.
void CachingAllocator::note(Action action, const Block* block, const void* address,
                            size_t num_bytes, const Stack& otherwise) {
  if (!history_.is_on()) return;
  const Stack& stack = History::stack();
  history_.add(action, address, num_bytes, block->stream, id_of(*block->pool),
               stack ? stack : otherwise);
}

// The free bytes have the place of an address there.
void CachingAllocator::note_out_of_memory(size_t num_bytes, StreamId stream, size_t free_bytes) {
  if (!history_.is_on()) return;
  const size_t rounded = round_size(num_bytes);
  history_.add(Action::kOutOfMemory, reinterpret_cast<const void*>(free_bytes), rounded, stream,
               id_of(pool_for(rounded, stream)), History::stack());
}

}  // namespace sim
