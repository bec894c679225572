// What bounds the allocator's memory: the memory fraction, garbage collection of old segments, and
// private pools, whose memory is kept apart.
//
// Source of the rules: c10/cuda/CUDACachingAllocator.cpp.
#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "allocator.h"

namespace sim {
using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;

// --------------------------------------------------------------------------------------- fraction

void CachingAllocator::set_memory_fraction(double fraction) {
  TORCH_CHECK_VALUE(fraction >= 0 && fraction <= 1, "the memory fraction is ", fraction,
                    "; expected a number from 0 to 1.");
  fraction_ = fraction < 1 ? std::optional<double>(fraction) : std::nullopt;
}

std::optional<size_t> CachingAllocator::allowed_bytes() const {
  if (!fraction_) return std::nullopt;
  return static_cast<size_t>(*fraction_ * static_cast<double>(source_.capacity_bytes()));
}

// ------------------------------------------------------------------------------------- collection

// As on CUDA, the threshold means nothing without a memory fraction.
bool CachingAllocator::collects_garbage() const {
  return fraction_ && Config::garbage_collection_threshold() > 0.0;
}

// Gives back whole segments of the large pool that have not been reused for longer than the average
// of them, in rounds, until what is reserved is down to the threshold.
void CachingAllocator::collect_garbage() {
  const auto threshold = static_cast<size_t>(Config::garbage_collection_threshold() *
                                             static_cast<double>(*allowed_bytes()));
  if (reserved_bytes_ <= threshold) return;
  const size_t wanted_bytes = reserved_bytes_ - threshold;
  const auto age = [&](const Block* block) { return large_.num_searches - block->searches_before; };
  int64_t total_age = 0;
  int64_t num_blocks = 0;
  for (const Block* block : large_.free_blocks) {
    if (!block->is_whole_segment()) continue;
    total_age += age(block);
    num_blocks++;
  }
  if (num_blocks == 0) return;
  source_.synchronize_memory();
  size_t released = 0;
  bool released_any = true;
  while (released < wanted_bytes && released_any && num_blocks > 0) {
    const double average = static_cast<double>(total_age) / static_cast<double>(num_blocks);
    released_any = false;
    for (auto next = large_.free_blocks.begin(); next != large_.free_blocks.end();) {
      Block* block = *next++;
      if (!block->is_whole_segment() || block->expandable) continue;
      if (static_cast<double>(age(block)) < average) continue;
      released_any = true;
      released += block->size;
      total_age -= age(block);
      num_blocks--;
      release_segment(block);
    }
  }
}

// ---------------------------------------------------------------------------------- private pools

void CachingAllocator::add_pool_user(PoolId id) {
  const auto [entry, is_new] = private_pools_.try_emplace(id);
  if (is_new) {
    entry->second = std::make_unique<PrivatePool>(id);
  } else {
    entry->second->num_users++;
  }
}

void CachingAllocator::remove_pool_user(PoolId id) {
  const auto found = private_pools_.find(id);
  TORCH_CHECK(found != private_pools_.end() && found->second->num_users > 0, "the private pool (",
              id.first, ", ", id.second, ") has no user to remove.");
  found->second->num_users--;
}

int CachingAllocator::num_pool_users(PoolId id) const {
  const auto found = private_pools_.find(id);
  return found == private_pools_.end() ? 0 : found->second->num_users;
}

void CachingAllocator::begin_allocating_to(PoolId id, std::function<bool(StreamId)> takes) {
  for (const auto& [directed, _] : directed_) {
    TORCH_CHECK(directed != id, "allocations go to the private pool (", id.first, ", ", id.second,
                ") already.");
  }
  add_pool_user(id);
  directed_.emplace_back(id, std::move(takes));
}

void CachingAllocator::end_allocating_to(PoolId id) {
  for (auto entry = directed_.begin(); entry != directed_.end(); ++entry) {
    if (entry->first != id) continue;
    directed_.erase(entry);
    return;
  }
  TORCH_CHECK(false, "allocations do not go to the private pool (", id.first, ", ", id.second,
              ").");
}

void CachingAllocator::release_unused_pools(PoolId only) {
  for (auto next = private_pools_.begin(); next != private_pools_.end();) {
    PrivatePool& pool = *next->second;
    const bool is_meant = only == PoolId{0, 0} || only == pool.id;
    if (is_meant && pool.num_users == 0) {
      release_free_memory(pool.small);
      release_free_memory(pool.large);
    }
    const bool is_directed_to = std::any_of(directed_.begin(), directed_.end(),
                                            [&](const auto& d) { return d.first == pool.id; });
    const bool is_gone = pool.num_users == 0 && pool.reserved_bytes == 0 && !is_directed_to;
    next = is_gone ? private_pools_.erase(next) : std::next(next);
  }
}

size_t CachingAllocator::free_bytes_in_private_pools() const {
  size_t num_bytes = 0;
  for (const auto& [_, pool] : private_pools_) {
    for (const Pool* part : {&pool->small, &pool->large}) {
      for (const Block* block : part->free_blocks) num_bytes += block->size;
    }
  }
  return num_bytes;
}

}  // namespace sim
