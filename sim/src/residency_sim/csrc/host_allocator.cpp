#include "host_allocator.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

namespace sim {
namespace {

size_t power_of_two(size_t num_bytes) {
  size_t power = 1;
  while (power < num_bytes) power *= 2;
  return power;
}

// In large pages where the system has them, which costs a tenth of the time.
bool commit_pages(void* address, size_t num_bytes) {
  madvise(address, num_bytes, MADV_HUGEPAGE);
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers do not name
  if (madvise(address, num_bytes, kPopulateWrite) == 0) return true;
  if (errno != EINVAL) return false;
  std::memset(address, 0, num_bytes);  // Linux before 5.14
  return true;
}

}  // namespace

size_t physical_memory_bytes() {
  static const size_t num_bytes =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
  return num_bytes;
}

size_t available_memory_bytes() {
  std::ifstream lines("/proc/meminfo");
  std::string name;
  size_t num_kib = 0;
  while (lines >> name >> num_kib) {
    if (name == "MemAvailable:") return num_kib << 10;
    lines.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return physical_memory_bytes();
}

HostAllocator::Blocks::iterator HostAllocator::around(Blocks& blocks, const void* address) {
  const auto position = reinterpret_cast<uintptr_t>(address);
  auto next = blocks.upper_bound(position);
  if (next == blocks.begin()) return blocks.end();
  auto found = std::prev(next);
  return position < found->first + found->second.size ? found : blocks.end();
}

bool HostAllocator::is_quiet(const Block& block) const {
  return std::all_of(block.uses.begin(), block.uses.end(),
                     [&](Ticket use) { return streams_.is_reached(use); });
}

// A block can be had again once the copies that used it have run.
void HostAllocator::retire(Block& block) {
  block.is_active = false;
  statistics_.active_requests.decrease(1);
  statistics_.active_bytes.decrease(block.size);
}

void HostAllocator::retire_quiet_blocks() {
  for (auto& [address, block] : blocks_) {
    if (block.is_active && !block.is_used && is_quiet(block)) retire(block);
  }
}

HostAllocator::Blocks::iterator HostAllocator::pin(size_t size, bool commits) {
  if (commits) {
    const auto pinned_bytes = static_cast<size_t>(statistics_.allocated_bytes.current);
    const size_t most_bytes = physical_memory_bytes();
    if (size > most_bytes || pinned_bytes > most_bytes - size) return blocks_.end();
    if (size > available_memory_bytes()) return blocks_.end();
  }
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return blocks_.end();
  if (commits && !commit_pages(address, size)) {
    munmap(address, size);
    return blocks_.end();
  }
  statistics_.allocations.increase(1);
  statistics_.allocated_bytes.increase(size);
  statistics_.alloc_time.increase(0);
  return blocks_.emplace(reinterpret_cast<uintptr_t>(address), Block{.size = size}).first;
}

void* HostAllocator::allocate(size_t num_bytes, bool commits, bool& is_reused) {
  is_reused = false;
  if (num_bytes == 0) return nullptr;
  retire_quiet_blocks();
  const size_t size = power_of_two(num_bytes);
  auto found = std::find_if(blocks_.begin(), blocks_.end(), [&](const auto& entry) {
    return !entry.second.is_active && entry.second.size == size;
  });
  is_reused = found != blocks_.end();
  if (!is_reused) {
    found = pin(size, commits);
    if (found == blocks_.end()) return nullptr;
  }
  Block& block = found->second;
  block.is_used = block.is_active = true;
  block.uses.clear();
  statistics_.used_bytes.increase(size);
  statistics_.active_requests.increase(1);
  statistics_.active_bytes.increase(size);
  return reinterpret_cast<void*>(found->first);
}

void HostAllocator::free(void* address) {
  if (!address) return;
  Block& block = blocks_.at(reinterpret_cast<uintptr_t>(address));
  block.is_used = false;
  statistics_.used_bytes.decrease(block.size);
  if (is_quiet(block)) retire(block);
}

bool HostAllocator::record_use(PinnedUse use, Ticket ticket) {
  auto found = blocks_.find(reinterpret_cast<uintptr_t>(use.context));
  if (found == blocks_.end()) found = blocks_.find(reinterpret_cast<uintptr_t>(use.address));
  if (found == blocks_.end()) {
    auto registered = around(registered_, use.address);
    if (registered != registered_.end()) note_use(registered->second, ticket);
    return false;
  }
  note_use(found->second, ticket);
  return true;
}

void HostAllocator::note_use(Block& block, Ticket ticket) {
  auto same = std::find_if(block.uses.begin(), block.uses.end(),
                           [&](Ticket use) { return use.stream == ticket.stream; });
  if (same == block.uses.end()) {
    block.uses.push_back(ticket);
  } else {
    *same = ticket;
  }
}

bool HostAllocator::is_pinned(const void* address) const {
  auto& self = *const_cast<HostAllocator*>(this);
  if (around(self.registered_, address) != self.registered_.end()) return true;
  auto found = around(self.blocks_, address);
  return found != blocks_.end() && found->second.is_used;
}

bool HostAllocator::add_registered(void* address, size_t num_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  for (Blocks* blocks : {&registered_, &blocks_}) {
    auto next = blocks->lower_bound(begin);
    if (next != blocks->end() && next->first < begin + num_bytes) return false;
    if (around(*blocks, address) != blocks->end()) return false;
  }
  if (num_bytes == 0 || !registered_.emplace(begin, Block{.size = num_bytes}).second) return false;
  statistics_.registered_bytes.increase(num_bytes);
  return true;
}

bool HostAllocator::remove_registered(void* address, bool& is_in_use) {
  auto found = registered_.find(reinterpret_cast<uintptr_t>(address));
  if (found == registered_.end()) return false;
  is_in_use = !is_quiet(found->second);
  statistics_.registered_bytes.decrease(found->second.size);
  registered_.erase(found);
  return true;
}

size_t HostAllocator::block_size(const void* address) const {
  return around(const_cast<HostAllocator*>(this)->blocks_, address)->second.size;
}

std::vector<Ticket> HostAllocator::uses_of_cache() const {
  std::vector<Ticket> uses;
  for (const auto& [address, block] : blocks_) {
    if (!block.is_used) uses.insert(uses.end(), block.uses.begin(), block.uses.end());
  }
  return uses;
}

void HostAllocator::empty_cache() {
  retire_quiet_blocks();
  for (auto next = blocks_.begin(); next != blocks_.end();) {
    auto entry = next++;
    const Block& block = entry->second;
    if (block.is_active) continue;
    munmap(reinterpret_cast<void*>(entry->first), block.size);
    statistics_.allocations.decrease(1);
    statistics_.allocated_bytes.decrease(block.size);
    statistics_.free_time.increase(0);
    blocks_.erase(entry);
  }
}

}  // namespace sim
