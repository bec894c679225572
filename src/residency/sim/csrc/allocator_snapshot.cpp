// What the allocator shows of its memory, block by block.
//
// Source of the rules: c10/cuda/CUDACachingAllocator.cpp, `snapshot`.
#include <algorithm>

#include "allocator.h"

namespace sim {

std::vector<CachingAllocator::Segment> CachingAllocator::segments(
    const std::vector<const Block*>& draining) const {
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
  for (const Block* block : first) {
    const PrivatePool* owner = block->pool->owner;
    const PoolId id = owner ? owner->id : PoolId{0, 0};
    Segment& segment = found.emplace_back(Segment{id, block->pool->is_small, {}});
    for (; block && block->is_mapped; block = block->after) segment.blocks.push_back(*block);
  }
  return found;
}

}  // namespace sim
