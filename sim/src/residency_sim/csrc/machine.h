// The simulated machine: one device, its streams, its memory, its pinned host memory and its race
// checker. Everything above this file (the torch_*.cpp files) translates torch's calls into calls
// of this class; everything below it knows nothing of torch's tensors.
//
// [Note: two locks] `lock_` guards the state; it is held for moments, and never while anything of
// torch's or Python's runs. `turn_` is the turn to run queued work, one thread at a time, and is
// held while a kernel runs. A kernel may be written in Python, so who waits for the turn lets
// go of the interpreter's lock meanwhile; a tensor can be freed under the interpreter's lock, so a
// free needs `lock_` alone. Order: the turn, the interpreter's lock, `lock_`.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "allocator.h"
#include "captures.h"
#include "clock.h"
#include "devices.h"
#include "host_allocator.h"
#include "race_checker.h"
#include "settings.h"
#include "shared_capacity.h"
#include "streams.h"

namespace sim {

struct Event {
  bool is_recorded = false;
  uint64_t epoch = 0;     // of the machine's settings, which begin the two below anew
  CaptureId capture = 0;  // that it was recorded in, and what came before it there
  CapturedPast captured_past;
  Ticket ticket;
  Past past{};
  double seconds = 0.0;  // simulated where there is a clock, else the host's
};

// Whether work failed for an index that is out of bounds: what a kernel of CUDA's asserts.
bool is_index_failure(const std::exception_ptr& failure);

class Machine final : private MemorySource {
 public:
  static Machine& get();

  const Settings& settings() const { return settings_; }
  bool checks_races() const { return settings_.check_races; }
  bool has_clock() const { return settings_.rates.has_value(); }
  double now_seconds();  // simulated
  // With a name, the capacity is that of all processes that give the same one (shared_capacity.h).
  // On an exception nothing has changed.
  void configure(const Settings& settings, const std::string& share_folder,
                 const std::string& share_name);

  // What the machine asks of Python's interpreter.
  struct Python {
    std::string (*line)() = nullptr;            // that issues an operation; called without locks
    void (*throw_race)(const Race&) = nullptr;  // as an exception of Python's
    void (*wait_for)(std::mutex&) = nullptr;    // locks, without the interpreter's lock meanwhile
  };
  void set_python(const Python& python) { python_ = python; }
  // What runs outside the streams (collectives); a synchronisation of the device waits for it, too,
  // before it takes a lock.
  void set_before_synchronize(void (*waiter)()) { before_synchronize_ = waiter; }

  // [Note: contexts] A process has no context until it does something with the device, and keeps it
  // from then on: memory of it or page-locked, streams, events, synchronisation, and the question
  // how much of it is free (pytorch#28113, #103584). It takes bytes of the device.
  void use_context_on(int index);

  // streams
  StreamId create_stream();
  static StreamId current_stream();
  static StreamId exchange_stream(StreamId stream);

  // work: kernels are launched (run now, or queued where that shows), copies enqueued. Only
  // work that may wait outlives the call; the rest may refer to the caller's frame.
  template <class Work>
  void launch(Launch&& launch, Work&& work) {
    if (is_broken_) raise_failure();
    if (is_capturing()) return capture(std::move(launch), std::forward<Work>(work));
    if (!checks_races() && !has_clock() && is_alone()) return work();
    std::string line = line_of_python();
    std::unique_lock<std::mutex> guard = enter();
    const StreamId stream = current_stream();
    note(stream, launch, std::move(line));
    if (streams_.is_alone(stream)) {
      guard.unlock();
      return work();
    }
    if (!launch.may_wait) return run_now(std::move(guard), stream, std::ref(work));
    const Ticket ticket = streams_.submit(stream, std::forward<Work>(work));
    guard.unlock();
    if (runs_at_once()) run_until(ticket);
  }
  void enqueue(Launch&& launch, std::function<void()> work, PinnedUse pinned = {});
  void observe(Launch&& launch);  // tells the checker and the clock of work that is not done
  bool is_alone() const;          // no stream but the current one can tell when work runs
  void run_current_stream();      // without the host having waited, as the checker sees it
  void synchronize_stream(StreamId stream);
  void synchronize();
  bool is_stream_done(StreamId stream);

  // [Note: failures] What work throws after the program has gone on, the device keeps, in order. It
  // comes out where the program next waits for the device, or issues work that cannot wait; that
  // work is not done then. In CUDA's place an index out of bounds ends the device for the process.
  void fail(std::exception_ptr failure);
  void recover();  // from a failure that ended the device

  // captures of the current stream into a graph, whose memory comes from a private pool; its work
  // runs when it is replayed, on the stream that is current then
  bool is_capturing() const { return captures_.is_captured(current_stream()); }
  // Kernels are run for their shapes only: in dry mode, or because they run when replayed.
  bool makes_shapes_only() const { return settings_.dry || is_capturing(); }
  void begin_capture(PoolId pool, CaptureMode mode);
  std::shared_ptr<const Graph> end_capture(PoolId pool);
  void capture(Launch&& launch, std::function<void()> work);
  void capture_issue(Launch&& launch, Graph::Issue issue);
  void replay(const std::shared_ptr<const Graph>& graph);

  // events
  void record(Event& event, StreamId stream);
  void wait(StreamId stream, const Event& event);
  bool query(const Event& event);
  void synchronize(const Event& event);
  double seconds_between(const Event& first, const Event& second);

  // device memory
  void* allocate(size_t num_bytes);  // throws c10::OutOfMemoryError with CUDA's figures
  void free(void* address);
  void record_stream(const void* address, StreamId stream);
  void empty_cache(PoolId only = {0, 0});
  bool is_device_address(const void* address);
  std::pair<size_t, size_t> free_and_total_bytes(int index);
  // What the allocator shows, of all pools or of one, and what it remembers.
  struct Snapshot {
    std::vector<CachingAllocator::Segment> segments;
    std::deque<History::Entry> entries;
    std::deque<History::Annotation> annotations;
  };
  Snapshot snapshot(PoolId only, bool with_entries);
  // Hears of every allocation that fails, before the error and without locks: the bytes that the
  // device was asked for, that this process may have of it, and that are free.
  using Observer = std::function<void(size_t asked, size_t allowed, size_t free)>;
  void attach_observer(Observer observer);
  // Runs `use` on the allocator, for its settings and figures; it allocates and frees nothing that
  // tensors hold.
  template <class Use>
  auto with_allocator(Use use) {
    Guard guard(lock_);
    return use(allocator_);
  }

  // pinned host memory
  void* allocate_pinned(size_t num_bytes);  // throws c10::AcceleratorError in CUDA's words
  void free_pinned(void* address);
  bool record_pinned_use(PinnedUse use, StreamId stream);
  bool is_pinned(const void* address);
  // Calls of CUDA's runtime, which answer whether they were done.
  bool register_host(void* address, size_t num_bytes);
  bool unregister_host(void* address);  // throws where a copy has yet to use it
  void empty_pinned_cache();
  HostStatistics pinned_statistics();
  void reset_peak_pinned_statistics();
  void reset_accumulated_pinned_statistics();

 private:
  using Guard = std::lock_guard<std::mutex>;
  class Turn;

  Machine();

  size_t capacity_bytes() const override { return settings_.capacity_bytes; }
  char* reserve(size_t num_bytes) override;
  void release(char* segment, size_t num_bytes) override;
  void synchronize_memory() override;
  void finish_pending_frees() override;
  char* reserve_addresses(size_t num_bytes) override;
  void release_addresses(char* address, size_t num_bytes) override;
  bool map(char* address, size_t num_bytes) override;
  void unmap(char* address, size_t num_bytes) override;
  bool take_room(size_t num_bytes);
  void give_back_room(char* address, size_t num_bytes);

  // Refuses a process that may not use the device (fork.h), and makes its context; held, the state
  // is the caller's. What does not come through here asks, and leaves a process as it is.
  std::unique_lock<std::mutex> enter();
  // For what needs some context of the process: the current device's, where there is none.
  std::unique_lock<std::mutex> enter_with_any_context();
  void make_context(int index);
  size_t context_bytes() const {
    const int index = machine_index();
    return index >= 0 && has_context(index) ? settings_.context_bytes : 0;
  }
  size_t held_bytes() const { return allocator_.reserved_bytes() + context_bytes(); }

  bool runs_at_once() const { return settings_.schedule == Schedule::kEager; }
  void run_until(Ticket ticket);
  void wait_on_host(const Event& event);
  bool has_happened(const Event& event);
  void check_event_wait(const Event& event);
  void check_stream_wait(StreamId stream);
  void check_page_locking(void* address);
  void run_now(std::unique_lock<std::mutex> guard, StreamId stream, std::function<void()> work);
  void raise_failure();
  bool has_failed();
  void run_all();
  bool run_one(Ticket ticket);
  bool advance(Ticket ticket);
  bool is_quiet() const;

  std::string line_of_python() const;
  void note(StreamId stream, const Launch& launch, std::string line);
  void check_races(StreamId stream, const char* name, std::string line,
                   const std::vector<Access>& accesses);
  void host_sees(const Event& event);
  void poison(Block* block, StreamId stream);
  void tell_profiler(void* address, int64_t num_bytes);
  size_t free_bytes();
  std::string holders_of_memory();
  [[noreturn]] void raise_out_of_memory(std::unique_lock<std::mutex> guard, size_t num_bytes);
  [[noreturn]] void raise_out_of_pinned_memory(size_t num_bytes);

  Settings settings_;
  uint64_t epoch_ = 0;  // how often the settings were made
  std::mutex lock_;     // [Note: two locks]
  std::mutex turn_;
  Streams streams_{settings_};
  Captures captures_;
  RaceChecker checker_;
  Clock clock_{Rates()};
  CachingAllocator allocator_{*this};
  HostAllocator host_{streams_};
  SharedCapacity share_;
  std::vector<std::pair<Ticket, Block*>> draining_;  // freed, but a recorded stream has yet to pass
  Python python_;
  // Shared: a copy of an observer of Python's would take the interpreter's lock.
  std::vector<std::shared_ptr<const Observer>> observers_;
  std::atomic<void (*)()> before_synchronize_ = nullptr;
  std::deque<std::exception_ptr> failures_;  // [Note: failures]
  bool is_fatal_ = false;                    // the last of them ends the device
  std::atomic<bool> is_broken_ = false;      // it has, and the program knows
};

}  // namespace sim
