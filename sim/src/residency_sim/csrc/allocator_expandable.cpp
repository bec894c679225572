// Segments that grow (`expandable_segments:True`): one range of addresses for each stream and pool,
// into which memory is mapped in whole granules as it is asked for, and out of which wholly free
// granules are unmapped again, at its end or in its middle.
//
// Source of the rules: c10/cuda/CUDACachingAllocator.cpp, "Note [Expandable Segments]".
#include <c10/core/AllocatorConfig.h>

#include <algorithm>

#include "allocator.h"

namespace sim {
namespace rules = c10::CachingAllocator;
using Config = rules::AcceleratorAllocatorConfig;

namespace {

// What a free block can grow to: its own bytes and the addresses right behind it.
size_t size_when_grown(const Block* block) {
  const bool can_grow = block->after && !block->after->is_mapped;
  return block->size + (can_grow ? block->after->size : 0);
}

bool has_room(const Block* block, size_t num_bytes) {
  size_t found = 0;
  while (found < num_bytes && block && block->is_free()) {
    found += block->size;
    block = block->after;
  }
  return found >= num_bytes;
}

void insert_before(Block* block, Block* following) {
  block->before = following->before;
  block->after = following;
  if (block->before) block->before->after = block;
  following->before = block;
}

void insert_behind(Block* block, Block* preceding) {
  block->after = preceding->after;
  block->before = preceding;
  if (block->after) block->after->before = block;
  preceding->after = block;
}

Block* part_of(const Block* whole, char* address, size_t size, bool is_mapped) {
  Block* part = new Block(whole->stream, address, size, whole->pool);
  part->expandable = whole->expandable;
  part->is_mapped = is_mapped;
  part->is_poisoned = is_mapped && whole->is_poisoned;
  return part;
}

}  // namespace

// Best fit goes by what a block can grow to, so that the growing end is spared while another block
// will do.
Pool::FreeBlocks::iterator CachingAllocator::best_expandable(Pool& pool,
                                                             Pool::FreeBlocks::iterator fit,
                                                             StreamId stream) const {
  for (auto next = std::next(fit);
       (*fit)->expandable && next != pool.free_blocks.end() && (*next)->stream == stream &&
       size_when_grown(*next) < size_when_grown(*fit);
       ++next) {
    fit = next;
  }
  return fit;
}

// The least address at which there is room, free or unmapped; a new range where there is none.
Block* CachingAllocator::find_addresses(const Request& request) {
  Pool& pool = request.pool;
  Block least(request.stream, nullptr, 0, &pool);
  for (auto next = pool.unmapped.lower_bound(&least);
       next != pool.unmapped.end() && (*next)->stream == request.stream; ++next) {
    Block* block = *next;
    if (block->before && block->before->is_free()) block = block->before;
    if (has_room(block, request.rounded_bytes)) return block;
  }
  // An eighth more than there is memory, for ranges that get holes.
  const size_t granule = pool.is_small ? rules::kSmallBuffer : Config::large_segment_size();
  const size_t capacity = source_.capacity_bytes();
  const size_t size = round_up(std::max(capacity + capacity / 8, request.rounded_bytes), granule);
  char* address = source_.reserve_addresses(size);
  if (!address) return nullptr;
  Block* block = new Block(request.stream, address, size, &pool);
  block->expandable = new ExpandableSegment{address, size, granule};
  block->is_mapped = false;
  pool.unmapped.insert(block);
  return block;
}

// Maps the front of an unmapped block, in whole granules, and joins it to free neighbours; returns
// the free block, or nullptr when there is no room.
Block* CachingAllocator::map_block(Block* block, size_t num_bytes) {
  const size_t mapped = round_up(num_bytes, block->expandable->granule);
  char* address = block->address;
  if (!source_.map(address, mapped)) return nullptr;
  Pool& pool = *block->pool;
  pool.unmapped.erase(block);
  block->is_mapped = true;
  block->is_poisoned = false;
  if (mapped < block->size) {
    Block* rest = part_of(block, block->address + mapped, block->size - mapped, false);
    insert_behind(rest, block);
    pool.unmapped.insert(rest);
    block->size = mapped;
  }
  absorb(block, block->before);
  absorb(block, block->after);
  pool.put(block);
  count_reserved(pool, static_cast<int64_t>(mapped));
  note(Action::kMap, block, address, mapped);
  if (!block->before && !block->segment_stack) block->segment_stack = History::stack();
  return block;
}

// What was mapped before the room ran out stays mapped, as free memory.
Block* CachingAllocator::take_expandable(const Request& request) {
  Block* block = find_addresses(request);
  if (block && !block->is_mapped) {
    Block* unmapped = block;
    block = map_block(unmapped, std::min(unmapped->size, request.rounded_bytes));
    if (!block && unmapped->is_whole_segment()) release_addresses(unmapped);
  }
  while (block && block->size < request.rounded_bytes) {
    Block* next = block->after;  // unmapped: free neighbours have been joined
    block = map_block(next, std::min(next->size, request.rounded_bytes - block->size));
  }
  if (block) request.pool.take(block);
  return block;
}

// Unmaps the granules that lie wholly in a free block; the whole range goes when none is left.
void CachingAllocator::unmap_block(Block* block) {
  const ExpandableSegment& segment = *block->expandable;
  const auto offset = static_cast<size_t>(block->address - segment.address);
  const size_t begin = round_up(offset, segment.granule);
  const size_t end = (offset + block->size) / segment.granule * segment.granule;
  if (begin >= end) return;
  Pool& pool = *block->pool;
  source_.unmap(segment.address + begin, end - begin);
  pool.take(block);
  if (begin > offset) {
    Block* front = part_of(block, block->address, begin - offset, true);
    insert_before(front, block);
    pool.put(front);
  }
  if (end < offset + block->size) {
    Block* back = part_of(block, segment.address + end, offset + block->size - end, true);
    insert_behind(back, block);
    pool.put(back);
  }
  block->address = segment.address + begin;
  block->size = end - begin;
  block->is_mapped = false;
  block->is_poisoned = false;
  absorb(block, block->before);
  absorb(block, block->after);
  pool.unmapped.insert(block);
  count_reserved(pool, -static_cast<int64_t>(end - begin));
  note(Action::kUnmap, block, segment.address + begin, end - begin, block->segment_stack);
  if (block->is_whole_segment()) release_addresses(block);
}

void CachingAllocator::release_addresses(Block* block) {
  block->pool->unmapped.erase(block);
  source_.release_addresses(block->address, block->size);
  delete block->expandable;
  delete block;
}

}  // namespace sim
