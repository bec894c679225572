#include "host_allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace sim {
namespace {

size_t power_of_two(size_t num_bytes) {
  size_t power = 1;
  while (power < num_bytes) power *= 2;
  return power;
}

}  // namespace

HostAllocator::Blocks::iterator HostAllocator::around(const void* address) {
  const auto position = reinterpret_cast<uintptr_t>(address);
  auto next = blocks_.upper_bound(position);
  if (next == blocks_.begin()) return blocks_.end();
  auto found = std::prev(next);
  return position < found->first + found->second.size ? found : blocks_.end();
}

bool HostAllocator::is_quiet(const Block& block) const {
  return std::all_of(block.uses.begin(), block.uses.end(),
                     [&](Ticket use) { return streams_.is_reached(use); });
}

void* HostAllocator::allocate(size_t num_bytes, bool& is_reused) {
  is_reused = false;
  if (num_bytes == 0) return nullptr;
  const size_t size = power_of_two(num_bytes);
  auto found = std::find_if(blocks_.begin(), blocks_.end(), [&](const auto& entry) {
    return !entry.second.is_used && entry.second.size == size && is_quiet(entry.second);
  });
  if (found == blocks_.end()) {
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) throw std::bad_alloc();
    found = blocks_.emplace(reinterpret_cast<uintptr_t>(address), Block{size, false, {}}).first;
    statistics_.num_pinned++;
    statistics_.pinned_bytes += size;
  } else {
    is_reused = true;
  }
  found->second.is_used = true;
  found->second.uses.clear();
  statistics_.used_bytes += size;
  statistics_.peak_used_bytes = std::max(statistics_.peak_used_bytes, statistics_.used_bytes);
  statistics_.peak_pinned_bytes = std::max(statistics_.peak_pinned_bytes, statistics_.pinned_bytes);
  return reinterpret_cast<void*>(found->first);
}

void HostAllocator::free(void* address) {
  if (!address) return;
  Block& block = blocks_.at(reinterpret_cast<uintptr_t>(address));
  block.is_used = false;
  statistics_.used_bytes -= block.size;
}

void HostAllocator::record_use(const void* address, Ticket ticket) {
  auto found = around(address);
  if (found == blocks_.end()) return;
  auto& uses = found->second.uses;
  auto same = std::find_if(uses.begin(), uses.end(),
                           [&](Ticket use) { return use.stream == ticket.stream; });
  if (same == uses.end()) {
    uses.push_back(ticket);
  } else {
    *same = ticket;
  }
}

bool HostAllocator::is_pinned(const void* address) const {
  auto found = const_cast<HostAllocator*>(this)->around(address);
  return found != blocks_.end() && found->second.is_used;
}

size_t HostAllocator::block_size(const void* address) const {
  return const_cast<HostAllocator*>(this)->around(address)->second.size;
}

std::vector<Ticket> HostAllocator::uses_of_cache() const {
  std::vector<Ticket> uses;
  for (const auto& [address, block] : blocks_) {
    if (!block.is_used) uses.insert(uses.end(), block.uses.begin(), block.uses.end());
  }
  return uses;
}

void HostAllocator::empty_cache() {
  for (auto next = blocks_.begin(); next != blocks_.end();) {
    auto entry = next++;
    const Block& block = entry->second;
    if (block.is_used || !is_quiet(block)) continue;
    munmap(reinterpret_cast<void*>(entry->first), block.size);
    statistics_.pinned_bytes -= block.size;
    blocks_.erase(entry);
  }
}

}  // namespace sim
