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
}

Ticket Streams::submit(StreamId stream, std::function<void()> work) {
  enqueue(stream, Item{std::move(work), Ticket{}});
  return tip(stream);
}

void Streams::wait(StreamId waiter, Ticket ticket) {
  if (ticket.stream == waiter || is_reached(ticket)) return;
  enqueue(waiter, Item{nullptr, ticket});
}

bool Streams::is_queued() const {
  for (const Queue& queue : queues_) {
    if (!queue.items.empty()) return true;
  }
  return false;
}

Task Streams::pop(StreamId stream) {
  Queue& queue = queues_[stream];
  Task task{stream, std::move(queue.items.front().work)};
  queue.items.pop_front();
  return task;
}

void Streams::finish(StreamId stream) {
  queues_[stream].num_run++;
  num_pending_--;
}

void Streams::drop_reached_waits(StreamId stream) {
  const auto& items = queues_[stream].items;
  while (!items.empty() && !items.front().work && is_reached(items.front().awaited)) {
    finish(pop(stream).stream);
  }
}

bool Streams::can_run(StreamId stream) {
  drop_reached_waits(stream);
  const auto& items = queues_[stream].items;
  return !items.empty() && items.front().work;
}

// From any stream but the forced one: work that does not wait for what the forced one has yet to
// do.
std::optional<Task> Streams::take_overtaker(StreamId forced) {
  for (StreamId stream = 0; stream < kNumStreams; stream++) {
    if (stream != forced && can_run(stream)) return pop(stream);
  }
  return std::nullopt;
}

std::optional<Task> Streams::take(Ticket goal) {
  if (is_reached(goal)) return std::nullopt;
  if (settings_.schedule == Schedule::kOvertake) {
    if (auto overtaker = take_overtaker(goal.stream)) return overtaker;
  }
  // The forced stream's next piece, or of the streams that it waits for, one behind the other.
  Ticket awaited = goal;
  while (!is_reached(goal)) {
    if (can_run(awaited.stream)) return pop(awaited.stream);
    const auto& items = queues_[awaited.stream].items;
    if (!items.empty()) {
      awaited = items.front().awaited;
    } else if (is_reached(awaited)) {
      awaited = goal;  // nothing but waits that are over was left there: who waited for it goes on
    } else {
      break;  // what is awaited runs just now, and asks for this
    }
  }
  return std::nullopt;
}

}  // namespace sim
