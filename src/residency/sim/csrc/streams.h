// Streams as queues of closures that run only when something forces them. No torch in here.
//
// The host submits work; nothing runs until a caller names a point that must have been reached
// (`run_until`). Which other queues advance on that occasion is the schedule's choice (settings.h).
// Callers hold the machine's lock (machine.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
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

class Streams {
 public:
  explicit Streams(const Settings& settings) : settings_(settings), queues_(kNumStreams) {}

  StreamId create();
  Ticket submit(StreamId stream, std::function<void()> work);
  void wait(StreamId waiter, Ticket ticket);

  Ticket tip(StreamId stream) const;
  bool is_reached(Ticket ticket) const;
  bool is_idle(StreamId stream) const { return queues_[stream].items.empty(); }
  // True while no work is queued on any stream but this one.
  bool are_others_idle(StreamId stream) const {
    return num_pending_ == queues_[stream].items.size();
  }
  // True while work of this stream cannot be told from work that ran at once: nothing is queued on
  // it, and there has never been another stream. Needs no lock: an operation's fast path asks it.
  bool is_alone(StreamId stream) const {
    return num_pending_ == 0 && (used_streams_ & ~(uint64_t(1) << stream)) == 0;
  }

  void run_until(Ticket ticket);
  void run_all();
  // One item of progress towards the ticket, so that a loop over `event.query()` ends.
  void advance(Ticket ticket);

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

  void enqueue(StreamId stream, Item item);
  void run_front(StreamId stream);
  void run_others(StreamId forced);

  const Settings& settings_;
  std::vector<Queue> queues_;
  StreamId num_created_ = 0;
  std::atomic<uint64_t> used_streams_ = 0;  // one bit a stream
  std::atomic<uint64_t> num_pending_ = 0;   // items in all queues
};

}  // namespace sim
