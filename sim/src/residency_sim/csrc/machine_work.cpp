// The machine's streams, work and events: what is issued, and what runs when. Its memory is in
// machine.cpp.
#include <c10/util/Exception.h>

#include <chrono>
#include <memory>

#include "face.h"
#include "machine.h"

namespace sim {
namespace {

constexpr int kRunByALook = 16;  // operations, at most

thread_local StreamId t_current_stream = kDefaultStream;
thread_local bool t_has_turn = false;

double host_seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace

// The turn to run queued work, which a thread may take again while it has it. [Note: two locks]
class Machine::Turn {
 public:
  explicit Turn(Machine& machine) : machine_(machine), is_first_(!t_has_turn) {
    if (!is_first_) return;
    if (!machine.turn_.try_lock()) wait();
    t_has_turn = true;
  }
  // Does not wait: the turn may be another's afterwards.
  Turn(Machine& machine, std::try_to_lock_t)
      : machine_(machine), is_first_(!t_has_turn && machine.turn_.try_lock()) {
    t_has_turn |= is_first_;
  }
  Turn(const Turn&) = delete;
  ~Turn() {
    if (!is_first_) return;
    t_has_turn = false;
    machine_.turn_.unlock();
  }

 private:
  void wait() {
    if (machine_.python_.wait_for) {
      machine_.python_.wait_for(machine_.turn_);
    } else {
      machine_.turn_.lock();
    }
  }

  Machine& machine_;
  const bool is_first_;
};

// ---------------------------------------------------------------------------------------- streams

StreamId Machine::create_stream() {
  const auto guard = enter();
  return streams_.create();
}

StreamId Machine::current_stream() { return t_current_stream; }

StreamId Machine::exchange_stream(StreamId stream) {
  return std::exchange(t_current_stream, stream);
}

void Machine::synchronize_stream(StreamId stream) {
  check_stream_wait(stream);
  Event tip;
  record(tip, stream);
  wait_on_host(tip);
}

void Machine::synchronize() {
  if (auto* waiter = before_synchronize_.load()) waiter();
  auto guard = enter();
  captures_.check_device_wait();
  guard.unlock();
  run_all();
  raise_failure();
  guard.lock();
  if (checks_races()) checker_.synchronize_all();
  if (has_clock()) clock_.synchronize_all();
}

bool Machine::is_stream_done(StreamId stream) {
  check_stream_wait(stream);
  Event tip;
  record(tip, stream);
  return has_happened(tip);
}

void Machine::check_stream_wait(StreamId stream) {
  const auto guard = enter();
  captures_.check_stream_wait(stream);
}

// The host has waited: whatever it issues from now on comes after.
void Machine::host_sees(const Event& event) {
  if (event.epoch != epoch_) return;  // nothing from before the settings changed is remembered
  if (checks_races()) checker_.synchronize(event.past);
  if (has_clock()) clock_.synchronize(event.seconds);
}

double Machine::now_seconds() {
  Guard guard(lock_);
  return clock_.now_seconds();
}

// ------------------------------------------------------------------------------------------- work

// Runs, without the lock, the next piece on the way to the ticket; false when there is none.
bool Machine::run_one(Ticket ticket) {
  std::optional<Task> task;
  {
    Guard guard(lock_);
    task = streams_.take(ticket);
  }
  if (!task) return false;
  // One that throws has been run, as a failed kernel has. [Note: failures]
  struct Finished {
    ~Finished() {
      Guard guard(machine.lock_);
      machine.streams_.finish(stream);
    }
    Machine& machine;
    StreamId stream;
  } finished{*this, task->stream};
  try {
    task->work();
  } catch (...) {
    fail(std::current_exception());
  }
  return true;
}

void Machine::run_until(Ticket ticket) {
  const Turn turn(*this);
  while (run_one(ticket)) {
  }
}

// Runs work that may refer to the caller's frame: when this returns it has run, or never will.
void Machine::run_now(std::unique_lock<std::mutex> guard, StreamId stream,
                      std::function<void()> work) {
  struct Piece {
    std::function<void()> work;
    bool has_run = false;
    std::exception_ptr error;
  };
  auto piece = std::make_shared<Piece>(Piece{std::move(work)});
  const Ticket ticket = streams_.submit(stream, [this, piece] {
    if (!piece->work || has_failed()) return;
    piece->has_run = true;
    try {
      piece->work();
    } catch (...) {
      piece->error = std::current_exception();
    }
  });
  guard.unlock();
  {
    const Turn turn(*this);
    run_until(ticket);
    piece->work = nullptr;
  }
  if (piece->error) std::rethrow_exception(piece->error);
  if (piece->has_run) return;
  raise_failure();
  TORCH_INTERNAL_ASSERT(false, "work was issued by a kernel that it has to wait for");
}

void Machine::run_all() {
  for (StreamId stream = 0; stream < kNumStreams; stream++) {
    std::unique_lock<std::mutex> guard(lock_);
    const Ticket tip = streams_.tip(stream);
    const bool is_idle = streams_.is_reached(tip);
    guard.unlock();
    if (!is_idle) run_until(tip);
  }
}

// Says whether the ticket is reached; where it is not, makes some progress towards it, so that a
// loop over `event.query()` ends. While another thread runs, it makes the progress. A device would
// run more than one operation between two looks of a host that sleeps in between; so does this one.
bool Machine::advance(Ticket ticket) {
  {
    Guard guard(lock_);
    if (streams_.is_reached(ticket)) return true;
  }
  const Turn turn(*this, std::try_to_lock);
  for (int i = 0; t_has_turn && i < kRunByALook; ++i) {
    run_one(ticket);
    Guard guard(lock_);
    if (streams_.is_reached(ticket)) break;
  }
  return false;
}

// --------------------------------------------------------------------------------------- failures

namespace {

std::string text_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "";
  }
}

}  // namespace

bool is_index_failure(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::IndexError&) {
    return true;
  } catch (...) {
  }
  const std::string text = text_of(failure);
  return text.find("out of bounds") != std::string::npos ||
         text.find("out of range") != std::string::npos;
}

void Machine::fail(std::exception_ptr failure) {
  const bool is_fatal = face().is_cuda && is_index_failure(failure);
  const std::string text = is_fatal ? text_of(failure) : "";
  Guard guard(lock_);
  if (is_fatal_) return;  // nothing that a dead device does counts
  is_fatal_ = is_fatal;
  if (is_fatal) {
    constexpr int kAssert = 710;  // cudaErrorAssert
    failure = std::make_exception_ptr(c10::AcceleratorError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kAssert,
        "CUDA error: device-side assert triggered\nThe operation that failed was issued earlier: " +
            text +
            "\nNothing runs on this device any more; residency.sim.enable() begins anew.\n"));
  }
  failures_.push_back(std::move(failure));
}

bool Machine::has_failed() {
  Guard guard(lock_);
  return !failures_.empty();
}

void Machine::raise_failure() {
  std::exception_ptr failure;
  {
    Guard guard(lock_);
    if (failures_.empty()) return;
    failure = failures_.front();
    is_broken_ = is_fatal_ && failures_.size() == 1;
    if (!is_broken_) failures_.pop_front();
  }
  std::rethrow_exception(failure);
}

void Machine::recover() {
  Guard guard(lock_);
  if (!is_broken_) return;
  failures_.clear();
  is_fatal_ = is_broken_ = false;
}

// Nothing is pending but what this very thread runs.
bool Machine::is_quiet() const {
  return !streams_.is_pending() || (t_has_turn && !streams_.is_queued());
}

std::string Machine::line_of_python() const {
  return checks_races() && python_.line ? python_.line() : std::string();
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
    if (python_.throw_race) python_.throw_race(race);
    throw;
  }
}

void Machine::enqueue(Launch&& launch, std::function<void()> work, PinnedUse pinned) {
  if (is_capturing()) return capture(std::move(launch), std::move(work));
  std::string line = line_of_python();
  auto guard = enter();
  const StreamId stream = current_stream();
  note(stream, launch, std::move(line));
  const Ticket ticket = streams_.submit(stream, std::move(work));
  if (pinned.address) host_.record_use(pinned, ticket);
  guard.unlock();
  if (runs_at_once()) run_until(ticket);
}

void Machine::observe(Launch&& launch) {
  if (is_capturing()) return settings_.dry ? capture(std::move(launch), nullptr) : void();
  if (!checks_races() && !has_clock()) return;
  std::string line = line_of_python();
  const auto guard = enter();
  note(current_stream(), launch, std::move(line));
}

bool Machine::is_alone() const { return streams_.is_alone(current_stream()); }

void Machine::run_current_stream() {
  auto guard = enter();
  const Ticket tip = streams_.tip(current_stream());
  guard.unlock();
  run_until(tip);
}

// --------------------------------------------------------------------------------------- captures

void Machine::begin_capture(PoolId pool, CaptureMode mode) {
  const auto guard = enter();
  const CaptureId id = captures_.begin(current_stream(), mode);
  try {
    allocator_.begin_allocating_to(
        pool, [this, id](StreamId stream) { return captures_.id_of(stream) == id; });
  } catch (...) {
    captures_.end(current_stream());
    throw;
  }
}

std::shared_ptr<const Graph> Machine::end_capture(PoolId pool) {
  const auto guard = enter();
  if (is_capturing()) allocator_.end_allocating_to(pool);
  return std::make_shared<const Graph>(captures_.end(current_stream()));
}

void Machine::capture(Launch&& launch, std::function<void()> work) {
  auto shared = std::make_shared<const std::function<void()>>(std::move(work));
  capture_issue(std::move(launch), [shared] { return [shared] { (*shared)(); }; });
}

void Machine::capture_issue(Launch&& launch, Graph::Issue issue) {
  const auto guard = enter();
  captures_.add(current_stream(), {std::move(launch), std::move(issue)});
}

void Machine::replay(const std::shared_ptr<const Graph>& graph) {
  for (const Graph::Piece& piece : graph->pieces) {
    Launch launch = piece.launch;
    auto work = piece.issue();
    if (settings_.dry) {
      observe(std::move(launch));
      continue;
    }
    launch.may_wait = true;
    this->launch(std::move(launch), [this, graph, work = std::move(work)] {
      try {
        work();
      } catch (...) {
        fail(std::current_exception());
      }
    });
  }
}

// ----------------------------------------------------------------------------------------- events

void Machine::record(Event& event, StreamId stream) {
  const auto guard = enter();
  event.is_recorded = true;
  event.epoch = epoch_;
  event.capture = captures_.id_of(stream);
  if (event.capture) event.captured_past = captures_.past_of(stream);
  event.seconds = has_clock() ? clock_.record(stream) : host_seconds();
  event.ticket = streams_.tip(stream);
  if (checks_races()) event.past = checker_.record(stream);
}

void Machine::wait(StreamId stream, const Event& event) {
  auto guard = enter();
  if (!event.is_recorded) return;
  if (event.capture) return captures_.join(stream, event.capture, event.captured_past);
  captures_.check_work_outside(stream);
  streams_.wait(stream, event.ticket);
  if (event.epoch == epoch_) {
    if (checks_races()) checker_.wait(stream, event.past);
    if (has_clock()) clock_.wait(stream, event.seconds);
  }
  const Ticket tip = streams_.tip(stream);
  guard.unlock();
  if (runs_at_once()) run_until(tip);
}

bool Machine::query(const Event& event) {
  check_event_wait(event);
  return has_happened(event);
}

void Machine::check_event_wait(const Event& event) {
  const auto guard = enter();
  if (!event.is_recorded) return;
  captures_.check_event_wait(event.capture);
  captures_.check_safe();
}

bool Machine::has_happened(const Event& event) {
  auto guard = enter();
  if (!event.is_recorded) return true;
  guard.unlock();
  const bool is_reached = advance(event.ticket);
  raise_failure();
  if (!is_reached) return false;
  guard.lock();
  host_sees(event);
  return true;
}

void Machine::synchronize(const Event& event) {
  check_event_wait(event);
  wait_on_host(event);
}

void Machine::wait_on_host(const Event& event) {
  auto guard = enter();
  if (!event.is_recorded) return;
  guard.unlock();
  run_until(event.ticket);
  raise_failure();
  guard.lock();
  host_sees(event);
}

// Waits for both; a time from before the settings changed means nothing beside one from after.
double Machine::seconds_between(const Event& first, const Event& second) {
  synchronize(first);
  synchronize(second);
  TORCH_CHECK(first.epoch == second.epoch,
              "the events were recorded before and after residency.sim.enable() changed the "
              "settings, which starts the time anew; record both after it");
  return second.seconds - first.seconds;
}

}  // namespace sim
