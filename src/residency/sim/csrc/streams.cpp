#include "streams.h"

#include <utility>

namespace sim {

// From here on the default stream is not alone, so that its kernels are queued and can be late.
StreamId Streams::create() {
  const StreamId stream = 1 + num_created_++ % kNumPoolStreams;
  used_streams_ |= uint64_t(1) << stream;
  return stream;
}

void Streams::enqueue(StreamId stream, Item item) {
  Queue& queue = queues_[stream];
  used_streams_ |= uint64_t(1) << stream;
  queue.items.push_back(std::move(item));
  queue.num_submitted++;
  num_pending_++;
  if (settings_.schedule == Schedule::kEager) run_until(tip(stream));
}

Ticket Streams::submit(StreamId stream, std::function<void()> work) {
  enqueue(stream, Item{std::move(work), Ticket{}});
  return tip(stream);
}

void Streams::wait(StreamId waiter, Ticket ticket) {
  if (ticket.stream == waiter || is_reached(ticket)) return;
  enqueue(waiter, Item{nullptr, ticket});
}

Ticket Streams::tip(StreamId stream) const { return {stream, queues_[stream].num_submitted}; }

bool Streams::is_reached(Ticket ticket) const {
  return queues_[ticket.stream].num_run >= ticket.position;
}

// Items leave the queue before they run: one that throws has been run, as a failed kernel has.
void Streams::run_front(StreamId stream) {
  Queue& queue = queues_[stream];
  Item item = std::move(queue.items.front());
  queue.items.pop_front();
  queue.num_run++;
  num_pending_--;
  if (item.work) {
    item.work();
  } else {
    run_until(item.awaited);
  }
}

// Runs, on every stream but the forced one, all that does not wait for what the forced one has yet
// to do.
void Streams::run_others(StreamId forced) {
  for (bool progressed = true; progressed;) {
    progressed = false;
    for (StreamId stream = 0; stream < kNumStreams; stream++) {
      Queue& queue = queues_[stream];
      while (stream != forced && !queue.items.empty() &&
             (queue.items.front().work || is_reached(queue.items.front().awaited))) {
        run_front(stream);
        progressed = true;
      }
    }
  }
}

void Streams::run_until(Ticket ticket) {
  const bool overtake = settings_.schedule == Schedule::kOvertake;
  while (!is_reached(ticket)) {
    if (overtake) run_others(ticket.stream);
    run_front(ticket.stream);
  }
}

void Streams::run_all() {
  for (StreamId stream = 0; stream < kNumStreams; stream++) run_until(tip(stream));
}

void Streams::advance(Ticket ticket) {
  if (!is_reached(ticket)) run_front(ticket.stream);
}

}  // namespace sim
