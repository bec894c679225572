// The machine itself, and its memory. Its streams, work and events are in machine_work.cpp.
#include "machine.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "face.h"
#include "fork.h"

namespace sim {
namespace {

constexpr int kPoison = 0xFF;  // NaN in every floating dtype, -1 in every signed integer

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// What a call of CUDA's raises where torch's allocator is not asked.
[[noreturn]] void raise_out_of_memory_beside_torch(const std::string& why) {
  constexpr int kMemoryAllocation = 2;  // cudaErrorMemoryAllocation
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kMemoryAllocation,
      std::string(face().is_cuda ? "CUDA" : "sim") + " error: out of memory\n" + why + "\n");
}

}  // namespace

// Never destroyed: tensors may outlive every static object of this library.
Machine& Machine::get() {
  static auto* machine = new Machine;
  return *machine;
}

// No thread of the parent's holds the lock at the moment of a fork, so that a child can use it.
Machine::Machine() {
  const auto unlock = [] { get().lock_.unlock(); };
  pthread_atfork([] { get().lock_.lock(); }, unlock, unlock);
}

std::unique_lock<std::mutex> Machine::enter() {
  use_device();
  if (is_broken_) raise_failure();
  std::unique_lock<std::mutex> guard(lock_);
  if (machine_index() < 0) place_machine(current_device());
  make_context(machine_index());
  return guard;
}

std::unique_lock<std::mutex> Machine::enter_with_any_context() {
  use_device();
  if (is_broken_) raise_failure();
  std::unique_lock<std::mutex> guard(lock_);
  if (!has_any_context()) make_context(current_device());
  return guard;
}

void Machine::use_context_on(int index) {
  use_device();
  if (has_context(index)) return;
  Guard guard(lock_);
  make_context(index);
}

// Of a device that is not the machine there are always enough bytes: nothing else takes any.
void Machine::make_context(int index) {
  if (has_context(index)) return;
  const size_t num_bytes = settings_.context_bytes;
  if (index == machine_index() && !take_room(num_bytes)) {
    raise_out_of_memory_beside_torch("The context takes " +
                                     c10::CachingAllocator::format_size(num_bytes) + ", and " +
                                     c10::CachingAllocator::format_size(free_bytes()) +
                                     " of the device are free. " + holders_of_memory());
  }
  note_context(index);
}

void Machine::configure(const Settings& settings, const std::string& share_folder,
                        const std::string& share_name) {
  Guard guard(lock_);
  synchronize_memory();
  finish_pending_frees();
  if (share_name.empty()) {
    share_.leave();
  } else {
    // The kernel would give the bytes back too, but not remove the file.
    static const int at_exit = std::atexit([] { get().share_.leave(); });
    (void)at_exit;
    const size_t context_bytes = has_context(0) ? settings.context_bytes : 0;  // it is the only one
    share_.join(share_folder, share_name, settings.capacity_bytes,
                allocator_.reserved_bytes() + context_bytes);
  }
  checker_.reset();
  clock_ = Clock(settings.rates.value_or(Rates()));
  settings_ = settings;
  epoch_++;
}

// ---------------------------------------------------------------------------------- device memory

bool Machine::take_room(size_t num_bytes) {
  if (held_bytes() + num_bytes > settings_.capacity_bytes) return false;
  return !share_.is_joined() || share_.reserve(num_bytes);
}

void Machine::give_back_room(char* address, size_t num_bytes) {
  share_.release(num_bytes);
  checker_.forget(number(address), number(address) + num_bytes);
}

char* Machine::reserve(size_t num_bytes) {
  if (!take_room(num_bytes)) return nullptr;
  void* segment = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (segment != MAP_FAILED) return static_cast<char*>(segment);
  share_.release(num_bytes);
  return nullptr;
}

void Machine::release(char* segment, size_t num_bytes) {
  munmap(segment, num_bytes);
  give_back_room(segment, num_bytes);
}

char* Machine::reserve_addresses(size_t num_bytes) {
  void* address =
      mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : static_cast<char*>(address);
}

void Machine::release_addresses(char* address, size_t num_bytes) { munmap(address, num_bytes); }

bool Machine::map(char* address, size_t num_bytes) {
  if (!take_room(num_bytes)) return false;
  if (mprotect(address, num_bytes, PROT_READ | PROT_WRITE) == 0) return true;
  share_.release(num_bytes);
  return false;
}

// A new mapping over the old one gives its pages back to the host.
void Machine::unmap(char* address, size_t num_bytes) {
  mmap(address, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
  give_back_room(address, num_bytes);
}

// Called with the lock, which it lets go while work runs.
void Machine::synchronize_memory() {
  while (!is_quiet()) {
    lock_.unlock();
    try {
      run_all();
    } catch (...) {
      lock_.lock();
      throw;
    }
    lock_.lock();
  }
}

// In the order of the block's own stream, so that work issued earlier still sees what it should.
void Machine::poison(Block* block, StreamId stream) {
  if (settings_.dry || block->is_poisoned) return;
  char* address = block->address;
  const size_t size = block->size;
  if (streams_.is_idle(stream)) {
    std::memset(address, kPoison, size);
  } else {
    streams_.submit(stream, [address, size] { std::memset(address, kPoison, size); });
  }
}

// torch's profiler hears what the block took, or with the other sign what it gave back.
void Machine::tell_profiler(void* address, int64_t num_bytes) {
  c10::reportMemoryUsageToProfiler(address, num_bytes, allocator_.allocated_bytes(),
                                   allocator_.reserved_bytes(),
                                   c10::Device(face().device, machine_index()));
}

// An allocation counts as a write by its stream: another stream must wait for it before the first
// use, since the bytes may still be in use by work that the allocating stream issued earlier.
void* Machine::allocate(size_t num_bytes) {
  std::string line = line_of_python();
  const History::Call call(allocator_.history(), StacksOf::kBlocks);
  auto guard = enter();
  if (!captures_.is_any()) finish_pending_frees();
  const StreamId stream = current_stream();
  Block* block = allocator_.allocate(num_bytes, stream);
  if (!block) raise_out_of_memory(std::move(guard), num_bytes);
  tell_profiler(block->address, static_cast<int64_t>(block->size));
  poison(block, stream);
  block->is_poisoned = false;
  if (!checks_races()) return block->address;
  const uintptr_t begin = number(block->address);
  if (captures_.is_captured(stream)) {  // nothing happens until a replay
    checker_.forget(begin, begin + block->size);
    return block->address;
  }
  try {
    check_races(stream, "allocation", std::move(line), {{begin, begin + block->size, true}});
  } catch (...) {
    allocator_.free(block);
    throw;
  }
  return block->address;
}

void Machine::free(void* address) {
  const History::Call call(allocator_.history(), StacksOf::kFrees);
  Guard guard(lock_);
  Block* block = allocator_.find(address);
  if (!block) return;
  allocator_.begin_free(block);
  tell_profiler(block->address, -static_cast<int64_t>(block->size));
  if (block->used_by == 0) {
    // Work that other streams have queued may still read it: legal, if the block's own stream waits
    // for that work before it reuses the block. Then the poison comes with the reuse.
    if (streams_.are_others_idle(block->stream)) {
      poison(block, block->stream);
      block->is_poisoned = !settings_.dry;
    }
    allocator_.finish_free(block);
    return;
  }
  for (StreamId stream = 0; stream < kNumStreams; stream++) {
    if (!(block->used_by >> stream & 1)) continue;
    draining_.emplace_back(streams_.tip(stream), block);
    block->num_pending_uses++;
  }
  block->used_by = 0;
}

// A block whose recorded uses have all been reached joins the cache, as when CUDA's allocator finds
// the events of such a block complete. The allocator vouches for the order, so the checker forgets.
void Machine::finish_pending_frees() {
  if (draining_.empty()) return;
  std::vector<std::pair<Ticket, Block*>> waiting;
  waiting.swap(draining_);
  for (auto& [ticket, block] : waiting) {
    if (!streams_.is_reached(ticket)) {
      draining_.emplace_back(ticket, block);
    } else if (--block->num_pending_uses == 0) {
      poison(block, block->stream);
      block->is_poisoned = !settings_.dry;
      checker_.forget(number(block->address), number(block->address) + block->size);
      allocator_.finish_free(block);
    }
  }
}

void Machine::record_stream(const void* address, StreamId stream) {
  Guard guard(lock_);
  Block* block = allocator_.find(address);
  if (block && block->stream != stream) block->used_by |= uint64_t(1) << stream;
}

void Machine::empty_cache(PoolId only) {
  if (is_broken_) raise_failure();
  const History::Call call(allocator_.history(), StacksOf::kFrees);
  Guard guard(lock_);
  allocator_.empty_cache(only);
}

bool Machine::is_device_address(const void* address) {
  Guard guard(lock_);
  return allocator_.contains(address);
}

std::pair<size_t, size_t> Machine::free_and_total_bytes(int index) {
  use_context_on(index);
  if (is_broken_) raise_failure();
  Guard guard(lock_);
  const size_t others = settings_.capacity_bytes - settings_.context_bytes;
  return {index == machine_index() ? free_bytes() : others, settings_.capacity_bytes};
}

size_t Machine::free_bytes() {
  return share_.is_joined() ? share_.figures().free_bytes : settings_.capacity_bytes - held_bytes();
}

// The event of a snapshot comes after what it shows.
Machine::Snapshot Machine::snapshot(PoolId only, bool with_entries) {
  Guard guard(lock_);
  std::vector<const Block*> draining;
  for (const auto& [_, block] : draining_) draining.push_back(block);
  Snapshot shown;
  if (with_entries) shown.entries = allocator_.history().entries();
  shown.annotations = allocator_.history().annotations();
  shown.segments = allocator_.segments(draining, only);
  return shown;
}

void Machine::attach_observer(Observer observer) {
  auto shared = std::make_shared<const Observer>(std::move(observer));
  Guard guard(lock_);
  observers_.push_back(std::move(shared));
}

// In the words of CUDA's message.
std::string Machine::holders_of_memory() {
  using c10::CachingAllocator::format_size;
  if (!share_.is_joined()) return "";
  std::string text;
  for (const auto& [pid, num_bytes] : share_.figures().others) {
    text +=
        "Process " + std::to_string(pid) + " has " + format_size(num_bytes) + " memory in use. ";
  }
  return text + "This process has " + format_size(held_bytes()) + " memory in use. ";
}

void Machine::raise_out_of_memory(std::unique_lock<std::mutex> guard, size_t num_bytes) {
  using c10::CachingAllocator::format_size;
  const size_t device_free = free_bytes();
  const size_t asked = CachingAllocator::segment_size(CachingAllocator::round_size(num_bytes));
  allocator_.note_out_of_memory(num_bytes, current_stream(), device_free);
  const size_t reserved = allocator_.reserved_bytes();
  const size_t allocated = allocator_.allocated_bytes();
  const auto allowed_bytes = allocator_.allowed_bytes();
  const std::string allowed = allowed_bytes ? format_size(*allowed_bytes) + " allowed; " : "";
  const size_t in_pools = allocator_.free_bytes_in_private_pools();
  const std::string pools = in_pools ? "with " + format_size(in_pools) +
                                           " allocated in private pools (e.g., CUDA Graphs), "
                                     : "";
  const std::string holders = holders_of_memory();
  const size_t capacity = settings_.capacity_bytes;
  const auto observers = observers_;
  guard.unlock();
  for (const auto& tell : observers) {
    (*tell)(asked, allowed_bytes.value_or(capacity), device_free);
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, face().out_of_memory, ". Tried to allocate ", format_size(asked),
      ". ", face().owner_of_memory, machine_index(), " has a total capacity of ",
      format_size(capacity), " of which ", format_size(device_free), " is free. ", holders, allowed,
      "Of the ", format_size(reserved), " in use, ", format_size(allocated + in_pools),
      " is allocated by PyTorch, ", pools, "and ", format_size(reserved - allocated - in_pools),
      " is reserved by PyTorch but unallocated.");
}

// ----------------------------------------------------------------------------- pinned host memory

void Machine::raise_out_of_pinned_memory(size_t num_bytes) {
  using c10::CachingAllocator::format_size;
  const auto pinned_bytes = static_cast<size_t>(host_.statistics().allocated_bytes.current);
  raise_out_of_memory_beside_torch(
      "Tried to page-lock " + format_size(num_bytes) +
      " of host memory, as a block of the next power of two; " + format_size(pinned_bytes) +
      " are page-locked already, and of this machine's " + format_size(physical_memory_bytes()) +
      " " + format_size(available_memory_bytes()) + " are available.");
}

// A call of CUDA's that may be unsafe for a capture, unlike one that the cache serves.
void Machine::check_page_locking(void* address) {
  try {
    captures_.check_safe();
  } catch (...) {
    host_.free(address);
    throw;
  }
}

// Commits the pages at once, as a real allocation does, but in dry mode, which stands for another
// machine.
void* Machine::allocate_pinned(size_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  const auto guard = enter_with_any_context();
  bool is_reused = false;
  void* address = host_.allocate(num_bytes, /*commits=*/!settings_.dry, is_reused);
  if (!address) raise_out_of_pinned_memory(num_bytes);
  if (!is_reused) check_page_locking(address);
  if (is_reused) checker_.forget(number(address), number(address) + host_.block_size(address));
  return address;
}

void Machine::free_pinned(void* address) {
  Guard guard(lock_);
  host_.free(address);
}

bool Machine::record_pinned_use(PinnedUse use, StreamId stream) {
  Guard guard(lock_);
  return host_.record_use(use, streams_.tip(stream));
}

// As CUDA's hooks, which ask the driver: "cudaPointerGetAttributes grabs context on the current
// device" (aten/src/ATen/cuda/detail/CUDAHooks.cpp).
bool Machine::is_pinned(const void* address) {
  if (!has_any_context() && !is_in_bad_fork()) enter_with_any_context();
  Guard guard(lock_);
  return host_.is_pinned(address);
}

bool Machine::register_host(void* address, size_t num_bytes) {
  const auto guard = enter_with_any_context();
  captures_.check_safe();
  checker_.forget(number(address), number(address) + num_bytes);
  return host_.add_registered(address, num_bytes);
}

bool Machine::unregister_host(void* address) {
  Guard guard(lock_);
  bool is_in_use = false;
  const bool is_done = host_.remove_registered(address, is_in_use);
  TORCH_CHECK(!is_in_use, "cudaHostUnregister of host memory that a queued copy has yet to use");
  return is_done;
}

void Machine::empty_pinned_cache() {
  if (is_broken_) raise_failure();
  std::unique_lock<std::mutex> guard(lock_);
  const std::vector<Ticket> uses = host_.uses_of_cache();
  guard.unlock();
  for (Ticket use : uses) run_until(use);
  guard.lock();
  host_.empty_cache();
}

HostStatistics Machine::pinned_statistics() {
  Guard guard(lock_);
  return host_.statistics();
}

void Machine::reset_peak_pinned_statistics() {
  Guard guard(lock_);
  host_.statistics().for_each([](auto& stat) { stat.reset_peak(); });
}

void Machine::reset_accumulated_pinned_statistics() {
  Guard guard(lock_);
  host_.statistics().for_each([](auto& stat) { stat.reset_accumulated(); });
}

}  // namespace sim
