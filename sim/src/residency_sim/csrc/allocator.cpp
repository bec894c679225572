#include "allocator.h"

#include <c10/core/AllocatorConfig.h>

#include <algorithm>
#include <limits>
#include <tuple>

namespace sim {
namespace rules = c10::CachingAllocator;
using Config = rules::AcceleratorAllocatorConfig;
using rules::StatType;

bool BlockOrder::operator()(const Block* a, const Block* b) const {
  return std::make_tuple(a->stream, a->size, reinterpret_cast<uintptr_t>(a->address)) <
         std::make_tuple(b->stream, b->size, reinterpret_cast<uintptr_t>(b->address));
}

bool AddressOrder::operator()(const Block* a, const Block* b) const {
  return std::make_tuple(a->stream, reinterpret_cast<uintptr_t>(a->address)) <
         std::make_tuple(b->stream, reinterpret_cast<uintptr_t>(b->address));
}

void Pool::put(Block* block) {
  block->searches_before = num_searches;
  if (spare.empty()) {
    free_blocks.insert(block);
  } else {
    spare.value() = block;
    free_blocks.insert(std::move(spare));
  }
}

size_t CachingAllocator::round_size(size_t num_bytes) {
  if (num_bytes < rules::kMinBlockSize) return rules::kMinBlockSize;
  const size_t divisions = Config::roundup_power2_divisions(num_bytes);
  if (divisions <= 1 || num_bytes <= rules::kMinBlockSize * divisions) {
    return round_up(num_bytes, rules::kMinBlockSize);
  }
  const size_t power = size_t(1) << (63 - __builtin_clzll(num_bytes));
  return power == num_bytes ? num_bytes
                            : round_up(num_bytes, std::max<size_t>(power / divisions, 1));
}

size_t CachingAllocator::segment_size(size_t rounded_bytes) {
  if (rounded_bytes <= rules::kSmallSize) return rules::kSmallBuffer;
  if (rounded_bytes < rules::kMinLargeAlloc) return Config::large_segment_size();
  return round_up(rounded_bytes, rules::kRoundLarge);
}

Pool& CachingAllocator::pool_for(size_t rounded_bytes, StreamId stream) {
  const bool is_small = rounded_bytes <= rules::kSmallSize;
  for (auto directed = directed_.rbegin(); directed != directed_.rend(); ++directed) {
    if (!directed->second(stream)) continue;
    PrivatePool& pool = *private_pools_.at(directed->first);
    return is_small ? pool.small : pool.large;
  }
  return is_small ? small_ : large_;
}

size_t CachingAllocator::allocated_bytes() const {
  return static_cast<size_t>(
      stats_.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)].current);
}

Block* CachingAllocator::find(const void* address) const {
  auto found = allocated_.find(address);
  return found == allocated_.end() ? nullptr : found->second;
}

bool CachingAllocator::contains(const void* address) const {
  const auto* byte = static_cast<const char*>(address);
  return std::any_of(allocated_.begin(), allocated_.end(), [&](const auto& entry) {
    const Block* block = entry.second;
    return byte >= block->address && byte < block->address + block->size;
  });
}

// Best fit on the block's own stream. A block above max_split_size serves only requests close to
// it.
Block* CachingAllocator::take_cached(const Request& request) {
  Pool& pool = request.pool;
  if (collects_garbage()) pool.num_searches++;
  Block wanted(request.stream, nullptr, request.rounded_bytes, &pool);
  auto found = pool.free_blocks.lower_bound(&wanted);
  const auto is_ours = [&] {
    return found != pool.free_blocks.end() && (*found)->stream == request.stream;
  };
  if (!is_ours()) return nullptr;
  if (request.expands) {
    found = best_expandable(pool, found, request.stream);
  } else {  // the setting was turned off after such segments had been made
    while (is_ours() && (*found)->expandable) ++found;
    if (!is_ours()) return nullptr;
  }
  Block* block = *found;
  const size_t limit = Config::max_split_size();
  if (request.rounded_bytes < limit && block->size >= limit) return nullptr;
  if (request.rounded_bytes >= limit &&
      block->size >= request.rounded_bytes + Config::max_non_split_rounding_size()) {
    return nullptr;
  }
  pool.take(found);
  return block;
}

void CachingAllocator::count_reserved(Pool& pool, int64_t difference) {
  reserved_bytes_ += static_cast<size_t>(difference);  // wraps as it should
  difference > 0 ? stats_.num_device_alloc++ : stats_.num_device_free++;
  count(pool, [&](size_t type) { adjust(stats_.reserved_bytes[type], difference); });
  if (!pool.owner) return;
  pool.owner->reserved_bytes += static_cast<size_t>(difference);
  auto& of_the_pool = pool_figures_[pool.owner->id];
  count(pool, [&](size_t type) { adjust(of_the_pool[type], difference); });
}

Block* CachingAllocator::count_segment(Pool& pool, char* address, size_t num_bytes,
                                       StreamId stream) {
  count_reserved(pool, static_cast<int64_t>(num_bytes));
  count(pool, [&](size_t type) { stats_.segment[type].increase(1); });
  if (num_bytes >= Config::max_split_size()) stats_.oversize_segments.increase(1);
  return new Block(stream, address, num_bytes, &pool);
}

// The limit is checked for a whole segment, also where only some granules would be mapped.
Block* CachingAllocator::take_new(const Request& request) {
  const auto allowed = allowed_bytes();
  if (allowed && reserved_bytes_ + request.segment_bytes > *allowed) return nullptr;
  return request.expands ? take_expandable(request) : take_segment(request);
}

Block* CachingAllocator::take_segment(const Request& request) {
  char* address = source_.reserve(request.segment_bytes);
  if (!address) return nullptr;
  Block* block = count_segment(request.pool, address, request.segment_bytes, request.stream);
  note(Action::kReserve, block, block->address, block->size);
  block->segment_stack = History::stack();
  return block;
}

void CachingAllocator::release_segment(Block* block) {
  Pool& pool = *block->pool;
  note(Action::kRelease, block, block->address, block->size, block->segment_stack);
  source_.release(block->address, block->size);
  count_reserved(pool, -static_cast<int64_t>(block->size));
  count(pool, [&](size_t type) { stats_.segment[type].decrease(1); });
  if (block->size >= Config::max_split_size()) stats_.oversize_segments.decrease(1);
  pool.take(block);
  delete block;
}

// Unmapping changes the free blocks, so those to unmap are gathered first.
void CachingAllocator::release_free_memory(Pool& pool) {
  std::vector<Block*> expandable;
  for (auto next = pool.free_blocks.begin(); next != pool.free_blocks.end();) {
    Block* block = *next++;
    if (block->expandable) {
      expandable.push_back(block);
    } else if (block->is_whole_segment()) {
      release_segment(block);
    }
  }
  for (Block* block : expandable) unmap_block(block);
}

void CachingAllocator::empty_cache(PoolId only) {
  source_.synchronize_memory();
  source_.finish_pending_frees();
  if (only == PoolId{0, 0} && directed_.empty()) {
    stats_.num_sync_all_streams++;
    release_free_memory(large_);
    release_free_memory(small_);
    journal_.add_note(Journal::Note::kEmptied, 0, reserved_bytes_, kDefaultStream);
  }
  release_unused_pools(only);
}

// Only under max_split_size: gives back cached oversized segments, which small requests cannot use,
// before the whole cache is flushed. True when what it gave back may do.
bool CachingAllocator::release_oversized_segments(const Request& request) {
  const size_t limit = Config::max_split_size();
  if (limit == std::numeric_limits<size_t>::max()) return false;
  const size_t wanted_bytes = std::max(request.rounded_bytes, limit);
  Pool& pool = request.pool;
  Block wanted(request.stream, nullptr, wanted_bytes, &pool);
  source_.synchronize_memory();
  auto next = pool.free_blocks.lower_bound(&wanted);
  if (next != pool.free_blocks.end() && (*next)->stream == request.stream && !(*next)->expandable &&
      (*next)->is_whole_segment()) {
    release_segment(*next);
    return true;
  }
  size_t released = 0;
  while (released < wanted_bytes && next != pool.free_blocks.begin()) {
    Block* block = *--next;
    if (block->stream != request.stream || block->size < limit) break;
    if (block->expandable || !block->is_whole_segment()) continue;
    ++next;
    released += block->size;
    release_segment(block);
  }
  return released >= wanted_bytes;
}

bool CachingAllocator::should_split(const Block* block, const Request& request) const {
  const size_t remainder = block->size - request.rounded_bytes;
  if (block->pool->is_small || request.expands) return remainder >= rules::kMinBlockSize;
  return request.rounded_bytes < Config::max_split_size() && remainder > rules::kSmallSize;
}

// Cuts the front off a block; the remainder goes back to the cache.
Block* CachingAllocator::split(Block* block, size_t rounded_bytes) {
  Block* front = new Block(*block);
  front->segment_stack = nullptr;  // as on CUDA, until the two are one again
  front->size = rounded_bytes;
  front->after = block;
  if (front->before) front->before->after = front;
  block->before = front;
  block->address += rounded_bytes;
  block->size -= rounded_bytes;
  block->pool->put(block);
  return front;
}

Block* CachingAllocator::hand_out(Block* block, size_t rounded_bytes, size_t requested, bool cut) {
  const Pool& pool = *block->pool;
  const bool was_split = !block->is_whole_segment();
  if (cut) {
    Block* remainder = block;
    block = split(remainder, rounded_bytes);
    if (!block->expandable)
      count(pool, [&](size_t type) {
        adjust(stats_.inactive_split[type], was_split ? 0 : 1);
        adjust(stats_.inactive_split_bytes[type],
               was_split ? -int64_t(rounded_bytes) : int64_t(remainder->size));
      });
  } else if (was_split && !block->expandable) {
    count(pool, [&](size_t type) {
      stats_.inactive_split[type].decrease(1);
      stats_.inactive_split_bytes[type].decrease(block->size);
    });
  }
  block->is_allocated = true;
  block->requested = requested;
  block->stack = History::stack();
  note(Action::kAllocate, block, block->address, requested);
  journal_.add(block->address, static_cast<int64_t>(block->size), requested, reserved_bytes_,
               block->stream);
  allocated_[block->address] = block;
  count(pool, [&](size_t type) {
    stats_.allocation[type].increase(1);
    stats_.allocated_bytes[type].increase(block->size);
    stats_.active[type].increase(1);
    stats_.active_bytes[type].increase(block->size);
    stats_.requested_bytes[type].increase(requested);
  });
  if (block->size >= Config::max_split_size()) stats_.oversize_allocations.increase(1);
  return block;
}

Block* CachingAllocator::allocate(size_t num_bytes, StreamId stream) {
  const size_t rounded = round_size(num_bytes);
  const Request request{pool_for(rounded, stream), rounded, segment_size(rounded), stream,
                        Config::use_expandable_segments()};
  Block* block = take_cached(request);
  if (!block) {
    if (collects_garbage()) collect_garbage();
    block = take_new(request);
  }
  if (!block && release_oversized_segments(request)) block = take_new(request);
  if (!block && directed_.empty()) {
    stats_.num_alloc_retries++;
    empty_cache();
    block = take_cached(request);  // frees that were draining may have joined the cache
    if (!block) block = take_new(request);
  }
  if (!block) {
    stats_.num_ooms++;
    return nullptr;
  }
  return hand_out(block, rounded, num_bytes, should_split(block, request));
}

void CachingAllocator::begin_free(Block* block) {
  block->is_allocated = false;
  allocated_.erase(block->address);
  count(*block->pool, [&](size_t type) {
    stats_.allocation[type].decrease(1);
    stats_.allocated_bytes[type].decrease(block->size);
  });
  note(Action::kRequestFree, block, block->address, block->requested, block->stack);
  journal_.add(block->address, -static_cast<int64_t>(block->size), block->requested,
               reserved_bytes_, block->stream);
  if (block->size >= Config::max_split_size()) stats_.oversize_allocations.decrease(1);
}

// Joins a free neighbour to the block, mapped as that is or unmapped; returns the bytes gained.
size_t CachingAllocator::absorb(Block* block, Block* neighbour) {
  if (!neighbour || !neighbour->is_free() || neighbour->is_mapped != block->is_mapped) return 0;
  if (neighbour == block->before) {
    block->address = neighbour->address;
    block->segment_stack = std::move(neighbour->segment_stack);
    block->before = neighbour->before;
    if (block->before) block->before->after = block;
  } else {
    block->after = neighbour->after;
    if (block->after) block->after->before = block;
  }
  const size_t gained = neighbour->size;
  block->size += gained;
  block->is_poisoned &= neighbour->is_poisoned;
  neighbour->is_mapped ? block->pool->take(neighbour)
                       : static_cast<void>(block->pool->unmapped.erase(neighbour));
  delete neighbour;
  return gained;
}

void CachingAllocator::finish_free(Block* block) {
  note(Action::kFree, block, block->address, block->requested, block->stack);
  block->stack = nullptr;
  const size_t size = block->size;
  int64_t num_splits = 0;
  int64_t split_bytes = 0;
  for (Block* neighbour : {block->before, block->after}) {
    const size_t gained = absorb(block, neighbour);
    num_splits -= gained ? 1 : 0;
    split_bytes -= int64_t(gained);
  }
  if (!block->is_whole_segment()) {
    num_splits++;
    split_bytes += int64_t(block->size);
  }
  block->pool->put(block);
  // Whole free granules of an expandable segment can be given back: it has no such remainders.
  if (block->expandable) num_splits = split_bytes = 0;
  count(*block->pool, [&](size_t type) {
    adjust(stats_.inactive_split[type], num_splits);
    adjust(stats_.inactive_split_bytes[type], split_bytes);
    stats_.active[type].decrease(1);
    stats_.active_bytes[type].decrease(size);
    stats_.requested_bytes[type].decrease(block->requested);
  });
}

// Every block is handed out first, so that the free ones become free by the ordinary way.
void CachingAllocator::adopt_segment(char* address, size_t num_bytes, bool is_small,
                                     const std::vector<Layout>& blocks) {
  Pool& pool = is_small ? small_ : large_;
  Block* rest = count_segment(pool, address, num_bytes, kDefaultStream);
  std::vector<Block*> unused;
  for (const Layout& layout : blocks) {
    const bool cut = layout.size < rest->size;
    Block* block = hand_out(rest, layout.size, layout.requested, cut);
    if (cut) pool.take(rest);
    if (layout.requested == 0) unused.push_back(block);
  }
  for (Block* block : unused) free(block);
}

}  // namespace sim
