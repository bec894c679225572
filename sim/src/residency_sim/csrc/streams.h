// Streams as queues of closures that run only when something forces them. No torch in here.
//
// The host submits work; nothing runs until a caller names a point that must have been reached and
// takes, runs and finishes one piece after the other until it is. Which queue the next piece comes
// from is the schedule's choice (settings.h). Nothing here runs anything: callers hold the
// machine's lock here, and none while they run what they took (machine.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "settings.h"

namespace sim {

using StreamId = int64_t;
constexpr StreamId kDefaultStream = 0;
constexpr StreamId kNumPoolStreams = 32;  // as torch's CUDA stream pool
constexpr StreamId kNumStreams = 1 + kNumPoolStreams;

// A point in a stream: reached once the stream's first `position` items have run.
struct Ticket {
  StreamId stream = kDefaultStream;
  uint64_t position = 0;
};

// A piece of queued work that has left its queue. It counts as pending until it is finished.
struct Task {
  StreamId stream;
  std::function<void()> work;
};

class Streams {
 public:
  explicit Streams(const Settings& settings) : settings_(settings), queues_(kNumStreams) {}

  StreamId create();
  Ticket submit(StreamId stream, std::function<void()> work);
  void wait(StreamId waiter, Ticket ticket);

  Ticket tip(StreamId stream) const { return {stream, queues_[stream].num_submitted}; }
  bool is_reached(Ticket ticket) const { return queues_[ticket.stream].num_run >= ticket.position; }
  bool is_idle(StreamId stream) const { return is_reached(tip(stream)); }
  // True while no work is pending on any stream but this one.
  bool are_others_idle(StreamId stream) const { return num_pending_ == num_pending(stream); }
  bool is_pending() const { return num_pending_ > 0; }
  bool is_queued() const;  // work that no thread has taken yet
  // True while work of this stream looks like work that ran at once: nothing is pending,
  // and there has never been another stream. Needs no lock: an operation's fast path asks it.
  bool is_alone(StreamId stream) const {
    return num_pending_ == 0 && (used_streams_ & ~(uint64_t(1) << stream)) == 0;
  }

  // The next piece that must run, or may under the schedule, for the goal to be reached. Nothing
  // when it is reached, or when what is left has been taken already.
  std::optional<Task> take(Ticket goal);
  void finish(StreamId stream);

 private:
  struct Item {
    std::function<void()> work;  // empty for a wait
    Ticket awaited;
  };
  struct Queue {
    std::deque<Item> items;
    uint64_t num_submitted = 0;
    uint64_t num_run = 0;
  };

  uint64_t num_pending(StreamId stream) const {
    return queues_[stream].num_submitted - queues_[stream].num_run;
  }
  void enqueue(StreamId stream, Item item);
  Task pop(StreamId stream);
  void drop_reached_waits(StreamId stream);
  bool can_run(StreamId stream);
  std::optional<Task> take_overtaker(StreamId forced);

  const Settings& settings_;
  std::vector<Queue> queues_;
  StreamId num_created_ = 0;
  std::atomic<uint64_t> used_streams_ = 0;  // one bit a stream
  std::atomic<uint64_t> num_pending_ = 0;   // items submitted and not run yet, of all queues
};

}  // namespace sim
