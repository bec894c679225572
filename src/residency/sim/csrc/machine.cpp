#include "machine.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "face.h"

namespace sim {
namespace {

using Guard = std::lock_guard<std::recursive_mutex>;

constexpr int kPoison = 0xFF;  // NaN in every floating dtype, -1 in every signed integer

thread_local StreamId t_current_stream = kDefaultStream;

double host_seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

}  // namespace

// Never destroyed: tensors may outlive every static object of this library.
Machine& Machine::get() {
  static auto* machine = new Machine;
  return *machine;
}

void Machine::configure(const Settings& settings, const std::string& share_folder,
                        const std::string& share_name) {
  Guard guard(lock_);
  streams_.run_all();
  finish_drained_frees(true);
  if (share_name.empty()) {
    share_.leave();
  } else {
    // The kernel would give the bytes back too, but not remove the file.
    static const int at_exit = std::atexit([] { get().share_.leave(); });
    (void)at_exit;
    share_.join(share_folder, share_name, settings.capacity_bytes, allocator_.reserved_bytes());
  }
  checker_.reset();
  clock_ = Clock(settings.rates.value_or(Rates()));
  settings_ = settings;
}

// ---------------------------------------------------------------------------------------- streams

StreamId Machine::create_stream() {
  Guard guard(lock_);
  return streams_.create();
}

StreamId Machine::current_stream() { return t_current_stream; }

StreamId Machine::exchange_stream(StreamId stream) {
  return std::exchange(t_current_stream, stream);
}

void Machine::synchronize_stream(StreamId stream) {
  Guard guard(lock_);
  streams_.run_until(streams_.tip(stream));
  host_sees(stream);
}

void Machine::synchronize() {
  if (auto* waiter = before_synchronize_.load()) waiter();
  Guard guard(lock_);
  streams_.run_all();
  if (checks_races()) checker_.synchronize_all();
  if (has_clock()) clock_.synchronize_all();
}

bool Machine::is_stream_done(StreamId stream) {
  Guard guard(lock_);
  const Ticket tip = streams_.tip(stream);
  streams_.advance(tip);
  if (!streams_.is_reached(tip)) return false;
  host_sees(stream);
  return true;
}

// The host has waited: whatever it issues from now on comes after.
void Machine::host_sees(StreamId stream) {
  if (checks_races()) checker_.synchronize(checker_.record(stream));
  if (has_clock()) clock_.synchronize(clock_.record(stream));
}

void Machine::host_sees(const Event& event) {
  if (checks_races()) checker_.synchronize(event.past);
  if (has_clock()) clock_.synchronize(event.seconds);
}

double Machine::now_seconds() {
  Guard guard(lock_);
  return clock_.now_seconds();
}

// ------------------------------------------------------------------------------------------- work

// Asked before the lock is taken: it needs the interpreter's lock, whose holder may be waiting for
// ours.
std::string Machine::line_of_python() const {
  return checks_races() && line_source_ ? line_source_() : std::string();
}

void Machine::note(StreamId stream, const Launch& launch, std::string line) {
  check_races(stream, launch.name, std::move(line), launch.accesses);
  if (!has_clock()) return;
  if (launch.engine == Engine::kCompute) {
    clock_.compute(stream, launch.num_bytes, launch.num_operations);
  } else {
    clock_.copy(stream, launch.engine, launch.num_bytes);
  }
}

void Machine::check_races(StreamId stream, const char* name, std::string line,
                          const std::vector<Access>& accesses) {
  if (!checks_races()) return;
  try {
    checker_.operate(stream, name, std::move(line), accesses);
  } catch (const Race& race) {
    if (race_thrower_) race_thrower_(race);
    throw;
  }
}

void Machine::enqueue(Launch&& launch, std::function<void()> work, const void* pinned) {
  std::string line = line_of_python();
  Guard guard(lock_);
  const StreamId stream = current_stream();
  note(stream, launch, std::move(line));
  const Ticket ticket = streams_.submit(stream, std::move(work));
  if (pinned) host_.record_use(pinned, ticket);
}

void Machine::observe(Launch&& launch) {
  if (!checks_races() && !has_clock()) return;
  std::string line = line_of_python();
  Guard guard(lock_);
  note(current_stream(), launch, std::move(line));
}

bool Machine::is_alone() const { return streams_.is_alone(current_stream()); }

void Machine::run_current_stream() {
  Guard guard(lock_);
  streams_.run_until(streams_.tip(current_stream()));
}

// ----------------------------------------------------------------------------------------- events

void Machine::record(Event& event, StreamId stream) {
  Guard guard(lock_);
  event.is_recorded = true;
  event.seconds = has_clock() ? clock_.record(stream) : host_seconds();
  event.ticket = streams_.tip(stream);
  if (checks_races()) event.past = checker_.record(stream);
}

void Machine::wait(StreamId stream, const Event& event) {
  Guard guard(lock_);
  if (!event.is_recorded) return;
  streams_.wait(stream, event.ticket);
  if (checks_races()) checker_.wait(stream, event.past);
  if (has_clock()) clock_.wait(stream, event.seconds);
}

bool Machine::query(const Event& event) {
  Guard guard(lock_);
  if (!event.is_recorded) return true;
  streams_.advance(event.ticket);
  if (!streams_.is_reached(event.ticket)) return false;
  host_sees(event);
  return true;
}

void Machine::synchronize(const Event& event) {
  Guard guard(lock_);
  if (!event.is_recorded) return;
  streams_.run_until(event.ticket);
  host_sees(event);
}

// ---------------------------------------------------------------------------------- device memory

char* Machine::reserve(size_t num_bytes) {
  if (allocator_.reserved_bytes() + num_bytes > settings_.capacity_bytes) return nullptr;
  if (share_.is_joined() && !share_.reserve(num_bytes)) return nullptr;
  void* segment = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (segment != MAP_FAILED) return static_cast<char*>(segment);
  share_.release(num_bytes);
  return nullptr;
}

void Machine::release(char* segment, size_t num_bytes) {
  munmap(segment, num_bytes);
  share_.release(num_bytes);
  checker_.forget(number(segment), number(segment) + num_bytes);
}

void Machine::before_release() {
  streams_.run_all();
  finish_drained_frees(true);
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

// An allocation counts as a write by its stream: another stream must wait for it before the first
// use, since the bytes may still be in use by work that the allocating stream issued earlier.
void* Machine::allocate(size_t num_bytes) {
  if (share_.is_joined()) share_.refuse_if_inherited();
  std::string line = line_of_python();
  Guard guard(lock_);
  finish_drained_frees(false);
  const StreamId stream = current_stream();
  Block* block = allocator_.allocate(num_bytes, stream);
  if (!block) raise_out_of_memory(num_bytes);
  poison(block, stream);
  block->is_poisoned = false;
  if (!checks_races()) return block->address;
  const uintptr_t begin = number(block->address);
  try {
    check_races(stream, "allocation", std::move(line), {{begin, begin + block->size, true}});
  } catch (...) {
    allocator_.free(block);
    throw;
  }
  return block->address;
}

void Machine::free(void* address) {
  Guard guard(lock_);
  Block* block = allocator_.find(address);
  if (!block) return;
  allocator_.begin_free(block);
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
void Machine::finish_drained_frees(bool force) {
  if (draining_.empty()) return;
  std::vector<std::pair<Ticket, Block*>> waiting;
  waiting.swap(draining_);
  for (auto& [ticket, block] : waiting) {
    if (force) streams_.run_until(ticket);
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

void Machine::empty_cache() {
  Guard guard(lock_);
  allocator_.empty_cache();
}

bool Machine::is_device_address(const void* address) {
  Guard guard(lock_);
  return allocator_.contains(address);
}

std::pair<size_t, size_t> Machine::free_and_total_bytes() {
  Guard guard(lock_);
  const size_t free_bytes = share_.is_joined()
                                ? share_.figures().free_bytes
                                : settings_.capacity_bytes - allocator_.reserved_bytes();
  return {free_bytes, settings_.capacity_bytes};
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
  return text + "This process has " + format_size(allocator_.reserved_bytes()) + " memory in use. ";
}

void Machine::raise_out_of_memory(size_t num_bytes) {
  using c10::CachingAllocator::format_size;
  const size_t reserved = allocator_.reserved_bytes();
  const size_t allocated = allocator_.allocated_bytes();
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, kOutOfMemory, ". Tried to allocate ",
      format_size(CachingAllocator::segment_size(CachingAllocator::round_size(num_bytes))), ". ",
      kOwnerOfMemory, " has a total capacity of ", format_size(settings_.capacity_bytes),
      " of which ", format_size(free_and_total_bytes().first), " is free. ", holders_of_memory(),
      "Of the ", format_size(reserved), " in use, ", format_size(allocated),
      " is allocated by PyTorch, and ", format_size(reserved - allocated),
      " is reserved by PyTorch but unallocated.");
}

// ----------------------------------------------------------------------------- pinned host memory

void* Machine::allocate_pinned(size_t num_bytes) {
  Guard guard(lock_);
  bool is_reused = false;
  void* address = host_.allocate(num_bytes, is_reused);
  if (is_reused) checker_.forget(number(address), number(address) + host_.block_size(address));
  return address;
}

void Machine::free_pinned(void* address) {
  Guard guard(lock_);
  host_.free(address);
}

void Machine::record_pinned_use(const void* address, StreamId stream) {
  Guard guard(lock_);
  host_.record_use(address, streams_.tip(stream));
}

bool Machine::is_pinned(const void* address) {
  Guard guard(lock_);
  return host_.is_pinned(address);
}

void Machine::empty_pinned_cache() {
  Guard guard(lock_);
  host_.empty_cache();
}

HostStatistics Machine::pinned_statistics() {
  Guard guard(lock_);
  return host_.statistics();
}

void Machine::reset_peak_pinned_statistics() {
  Guard guard(lock_);
  HostStatistics& statistics = host_.statistics();
  statistics.peak_used_bytes = statistics.used_bytes;
  statistics.peak_pinned_bytes = statistics.pinned_bytes;
}

}  // namespace sim
