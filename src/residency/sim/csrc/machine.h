// The simulated machine: one device, its streams, its memory, its pinned host memory and its race
// checker, behind one lock. Everything above this file (the torch_*.cpp files) translates torch's
// calls into calls of this class; everything below it knows nothing of torch's tensors.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "allocator.h"
#include "clock.h"
#include "host_allocator.h"
#include "race_checker.h"
#include "settings.h"
#include "shared_capacity.h"
#include "streams.h"

namespace sim {

struct Event {
  bool is_recorded = false;
  Ticket ticket;
  Past past{};
  double seconds = 0.0;  // simulated where there is a clock, else the host's
};

// One piece of device work: what the race checker and the clock want to know, and how it may be
// run.
struct Launch {
  const char* name;
  std::vector<Access> accesses;  // filled only while races are checked
  bool may_wait = false;         // all it does is to bytes that exist already, so it can run later
  Engine engine = Engine::kCompute;
  double num_bytes = 0;  // moved, read or written; this and the next only while there is a clock
  double num_operations = 0;
};

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

  // Who is asked for the line of Python that issues an operation (called without the lock), and who
  // turns a race into an exception of Python's.
  void set_python(std::string (*line_source)(), void (*race_thrower)(const Race&)) {
    line_source_ = line_source;
    race_thrower_ = race_thrower;
  }
  // What runs outside the streams (collectives); a synchronisation of the device waits for it, too,
  // before it takes the lock.
  void set_before_synchronize(void (*waiter)()) { before_synchronize_ = waiter; }

  // streams
  StreamId create_stream();
  static StreamId current_stream();
  static StreamId exchange_stream(StreamId stream);

  // work: kernels are launched (run now, or queued where that can be told), copies enqueued
  template <class Work>
  void launch(Launch&& launch, Work&& work) {
    // Without the lock: a kernel may wait for the interpreter's lock, whose holder may free a
    // tensor.
    if (!checks_races() && !has_clock() && is_alone()) return work();
    std::string line = line_of_python();
    std::lock_guard<std::recursive_mutex> guard(lock_);
    const StreamId stream = current_stream();
    note(stream, launch, std::move(line));
    if (streams_.is_alone(stream)) return work();
    const Ticket ticket = streams_.submit(stream, std::forward<Work>(work));
    if (!launch.may_wait) streams_.run_until(ticket);
  }
  void enqueue(Launch&& launch, std::function<void()> work, const void* pinned = nullptr);
  void observe(Launch&& launch);  // tells the checker and the clock of work that is not done
  bool is_alone() const;          // no stream but the current one can tell when work runs
  void run_current_stream();      // without the host having waited: the checker is not told
  void synchronize_stream(StreamId stream);
  void synchronize();
  bool is_stream_done(StreamId stream);

  // events
  void record(Event& event, StreamId stream);
  void wait(StreamId stream, const Event& event);
  bool query(const Event& event);
  void synchronize(const Event& event);

  // device memory
  void* allocate(size_t num_bytes);  // throws c10::OutOfMemoryError with CUDA's figures
  void free(void* address);
  void record_stream(const void* address, StreamId stream);
  void empty_cache(PoolId only = {0, 0});
  bool is_device_address(const void* address);
  std::pair<size_t, size_t> free_and_total_bytes();
  // Runs `use` on the allocator, for its settings and figures; it allocates and frees nothing that
  // tensors hold.
  template <class Use>
  auto with_allocator(Use use) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    return use(allocator_);
  }

  // pinned host memory
  void* allocate_pinned(size_t num_bytes);
  void free_pinned(void* address);
  void record_pinned_use(const void* address, StreamId stream);
  bool is_pinned(const void* address);
  void empty_pinned_cache();
  HostStatistics pinned_statistics();
  void reset_peak_pinned_statistics();

 private:
  Machine() = default;

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

  std::string line_of_python() const;
  void note(StreamId stream, const Launch& launch, std::string line);
  void check_races(StreamId stream, const char* name, std::string line,
                   const std::vector<Access>& accesses);
  void host_sees(StreamId stream);
  void host_sees(const Event& event);
  void finish_drained_frees(bool force);
  void poison(Block* block, StreamId stream);
  std::string holders_of_memory();
  [[noreturn]] void raise_out_of_memory(size_t num_bytes);

  Settings settings_;
  std::recursive_mutex lock_;
  Streams streams_{settings_};
  RaceChecker checker_;
  Clock clock_{Rates()};
  CachingAllocator allocator_{*this};
  HostAllocator host_{streams_};
  SharedCapacity share_;
  std::vector<std::pair<Ticket, Block*>> draining_;  // freed, but a recorded stream has yet to pass
  std::string (*line_source_)() = nullptr;
  void (*race_thrower_)(const Race&) = nullptr;
  std::atomic<void (*)()> before_synchronize_ = nullptr;
};

}  // namespace sim
