#include "allocator.h"

#include <c10/core/AllocatorConfig.h>

#include <algorithm>
#include <limits>
#include <tuple>

namespace sim {
namespace rules = c10::CachingAllocator;
using Config = rules::AcceleratorAllocatorConfig;
using rules::StatType;

namespace {

size_t round_up(size_t num_bytes, size_t multiple) {
  return (num_bytes + multiple - 1) / multiple * multiple;
}

// Statistics are kept three times: for both pools together and for each alone.
template <class Update>
void count(const Pool& pool, Update update) {
  update(static_cast<size_t>(StatType::AGGREGATE));
  update(static_cast<size_t>(pool.is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL));
}

void adjust(rules::Stat& stat, int64_t difference) {
  if (difference > 0) stat.increase(static_cast<size_t>(difference));
  if (difference < 0) stat.decrease(static_cast<size_t>(-difference));
}

}  // namespace

bool BlockOrder::operator()(const Block* a, const Block* b) const {
  return std::make_tuple(a->stream, a->size, reinterpret_cast<uintptr_t>(a->address)) <
         std::make_tuple(b->stream, b->size, reinterpret_cast<uintptr_t>(b->address));
}

void Pool::put(Block* block) {
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

Pool& CachingAllocator::pool_for(size_t rounded_bytes) {
  return rounded_bytes <= rules::kSmallSize ? small_ : large_;
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
Block* CachingAllocator::take_cached(Pool& pool, size_t rounded_bytes, StreamId stream) {
  Block wanted(stream, nullptr, rounded_bytes, &pool);
  auto found = pool.free_blocks.lower_bound(&wanted);
  if (found == pool.free_blocks.end() || (*found)->stream != stream) return nullptr;
  Block* block = *found;
  const size_t limit = Config::max_split_size();
  if (rounded_bytes < limit && block->size >= limit) return nullptr;
  if (rounded_bytes >= limit &&
      block->size >= rounded_bytes + Config::max_non_split_rounding_size()) {
    return nullptr;
  }
  pool.take(found);
  return block;
}

Block* CachingAllocator::count_segment(Pool& pool, char* address, size_t num_bytes,
                                       StreamId stream) {
  reserved_bytes_ += num_bytes;
  stats_.num_device_alloc++;
  count(pool, [&](size_t type) {
    stats_.segment[type].increase(1);
    stats_.reserved_bytes[type].increase(num_bytes);
  });
  return new Block(stream, address, num_bytes, &pool);
}

Block* CachingAllocator::take_segment(Pool& pool, size_t segment_bytes, StreamId stream) {
  char* address = source_.reserve(segment_bytes);
  return address ? count_segment(pool, address, segment_bytes, stream) : nullptr;
}

void CachingAllocator::release_segment(Block* block) {
  Pool& pool = *block->pool;
  source_.release(block->address, block->size);
  reserved_bytes_ -= block->size;
  stats_.num_device_free++;
  count(pool, [&](size_t type) {
    stats_.segment[type].decrease(1);
    stats_.reserved_bytes[type].decrease(block->size);
  });
  pool.take(block);
  delete block;
}

void CachingAllocator::release_free_segments(Pool& pool) {
  for (auto next = pool.free_blocks.begin(); next != pool.free_blocks.end();) {
    Block* block = *next++;
    if (block->is_whole_segment()) release_segment(block);
  }
}

void CachingAllocator::empty_cache() {
  source_.before_release();
  release_free_segments(large_);
  release_free_segments(small_);
}

// Only under max_split_size: gives back cached oversized segments, which small requests cannot use,
// before the whole cache is flushed.
Block* CachingAllocator::take_oversized_segment(Pool& pool, size_t segment_bytes, StreamId stream) {
  const size_t limit = Config::max_split_size();
  if (limit == std::numeric_limits<size_t>::max()) return nullptr;
  Block wanted(stream, nullptr, std::max(segment_bytes, limit), &pool);
  source_.before_release();  // may join free blocks: look only after it
  auto next = pool.free_blocks.lower_bound(&wanted);
  if (next != pool.free_blocks.end() && (*next)->stream == stream) {
    release_segment(*next);
    return take_segment(pool, segment_bytes, stream);
  }
  size_t released = 0;
  while (released < segment_bytes && next != pool.free_blocks.begin()) {
    Block* block = *std::prev(next);
    if (block->stream != stream || block->size < limit) break;
    released += block->size;
    next = std::next(std::prev(next));
    release_segment(block);
  }
  return released < segment_bytes ? nullptr : take_segment(pool, segment_bytes, stream);
}

bool CachingAllocator::should_split(const Block* block, size_t rounded_bytes) const {
  const size_t remainder = block->size - rounded_bytes;
  if (block->pool->is_small) return remainder >= rules::kMinBlockSize;
  return rounded_bytes < Config::max_split_size() && remainder > rules::kSmallSize;
}

// Cuts the front off a block; the remainder goes back to the cache.
Block* CachingAllocator::split(Block* block, size_t rounded_bytes) {
  Block* front = new Block(*block);
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
    count(pool, [&](size_t type) {
      adjust(stats_.inactive_split[type], was_split ? 0 : 1);
      adjust(stats_.inactive_split_bytes[type],
             was_split ? -int64_t(rounded_bytes) : int64_t(remainder->size));
    });
  } else if (was_split) {
    count(pool, [&](size_t type) {
      stats_.inactive_split[type].decrease(1);
      stats_.inactive_split_bytes[type].decrease(block->size);
    });
  }
  block->is_allocated = true;
  block->requested = requested;
  allocated_[block->address] = block;
  count(pool, [&](size_t type) {
    stats_.allocation[type].increase(1);
    stats_.allocated_bytes[type].increase(block->size);
    stats_.active[type].increase(1);
    stats_.active_bytes[type].increase(block->size);
    stats_.requested_bytes[type].increase(requested);
  });
  return block;
}

Block* CachingAllocator::allocate(size_t num_bytes, StreamId stream) {
  const size_t rounded = round_size(num_bytes);
  const size_t segment = segment_size(rounded);
  Pool& pool = pool_for(rounded);
  Block* block = take_cached(pool, rounded, stream);
  if (!block) block = take_segment(pool, segment, stream);
  if (!block) block = take_oversized_segment(pool, segment, stream);
  if (!block) {
    stats_.num_alloc_retries++;
    stats_.num_sync_all_streams++;
    empty_cache();
    block =
        take_cached(pool, rounded, stream);  // frees that were draining may have joined the cache
    if (!block) block = take_segment(pool, segment, stream);
  }
  if (!block) {
    stats_.num_ooms++;
    return nullptr;
  }
  return hand_out(block, rounded, num_bytes, should_split(block, rounded));
}

void CachingAllocator::begin_free(Block* block) {
  block->is_allocated = false;
  allocated_.erase(block->address);
  count(*block->pool, [&](size_t type) {
    stats_.allocation[type].decrease(1);
    stats_.allocated_bytes[type].decrease(block->size);
  });
}

// Joins a free neighbour to the block; returns the bytes gained.
size_t CachingAllocator::absorb(Block* block, Block* neighbour) {
  if (!neighbour || !neighbour->is_free()) return 0;
  if (neighbour == block->before) {
    block->address = neighbour->address;
    block->before = neighbour->before;
    if (block->before) block->before->after = block;
  } else {
    block->after = neighbour->after;
    if (block->after) block->after->before = block;
  }
  const size_t gained = neighbour->size;
  block->size += gained;
  block->is_poisoned &= neighbour->is_poisoned;
  block->pool->take(neighbour);
  delete neighbour;
  return gained;
}

void CachingAllocator::finish_free(Block* block) {
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
