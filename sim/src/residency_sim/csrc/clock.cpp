#include "clock.h"

#include <algorithm>
#include <iterator>

namespace sim {
namespace {

constexpr size_t kMostIntervals = 1 << 14;  // a link's past further back cannot meet a new copy
constexpr double kSmallBytes = 1 << 16;     // what passes between copies without moving them

size_t index(Engine engine) { return static_cast<size_t>(engine); }

// The intervals of a link follow one another.
template <class Intervals>
auto first_after(const Intervals& intervals, double time) {
  return std::partition_point(intervals.begin(), intervals.end(),
                              [&](const auto& each) { return each.end <= time; });
}

}  // namespace

double Clock::start(StreamId stream, Engine engine) const {
  return std::max({stream_seconds_[stream], engine_seconds_[index(engine)], host_seconds_});
}

void Clock::finish(StreamId stream, Engine engine, double end) {
  stream_seconds_[stream] = end;
  engine_seconds_[index(engine)] = end;
}

// While the other link is busy too, each has half of the duplex rate, or its own if that is less. A
// copy that was issued before is not slowed by one that comes after it.
double Clock::copy_end(double begin, double num_bytes, double rate,
                       const std::deque<Interval>& other) {
  if (rate <= 0) return begin;
  const double shared = rates_.duplex_bytes > 0 ? std::min(rate, rates_.duplex_bytes / 2) : rate;
  double time = begin;
  double left = num_bytes;
  for (auto busy = first_after(other, time); busy != other.end(); ++busy) {
    const double busy_begin = busy->begin, busy_end = busy->end;
    const double alone = std::max(0.0, busy_begin - time);
    if (left <= alone * rate) break;
    left -= alone * rate;
    time = std::max(time, busy_begin);
    const double together = busy_end - time;
    if (left <= together * shared) return time + left / shared;
    left -= together * shared;
    time = busy_end;
  }
  return time + left / rate;
}

// When a small copy begins on an engine that serves what is ready: at the first border between
// copies at which the next one is of another stream, and so had to wait for something.
double Clock::border(StreamId stream, const std::deque<Interval>& busy) const {
  const double ready = std::max(stream_seconds_[stream], host_seconds_);
  double free = ready;
  for (auto each = first_after(busy, ready); each != busy.end() && each->begin <= free; ++each) {
    free = each->end;
    const auto next = std::next(each);
    if (next != busy.end() && next->stream != each->stream) break;
  }
  return free;
}

void Clock::copy(StreamId stream, Engine link, double num_bytes) {
  const bool to_device = link == Engine::kToDevice;
  const double rate = to_device ? rates_.h2d_bytes : rates_.d2h_bytes;
  auto& busy = link_busy_[to_device ? 0 : 1];
  const bool follows_own = !busy.empty() && busy.back().stream == stream;
  if (rates_.serves_ready && rate > 0 && num_bytes <= kSmallBytes && !follows_own) {
    stream_seconds_[stream] = border(stream, busy) + num_bytes / rate;
    return;
  }
  const double begin = start(stream, link);
  const double end = copy_end(begin, num_bytes, rate, link_busy_[to_device ? 1 : 0]);
  if (end > begin) busy.push_back({begin, end, stream});
  if (busy.size() > kMostIntervals) busy.pop_front();
  finish(stream, link, end);
}

// A kernel is as slow as the slower of its arithmetic and its memory traffic. Kernels of different
// streams share the compute units one after another.
void Clock::compute(StreamId stream, double num_bytes, double num_operations) {
  const double traffic = rates_.memory_bytes > 0 ? num_bytes / rates_.memory_bytes : 0;
  const double arithmetic = rates_.operations > 0 ? num_operations / rates_.operations : 0;
  const double begin = start(stream, Engine::kCompute);
  finish(stream, Engine::kCompute, begin + std::max(traffic, arithmetic));
}

double Clock::record(StreamId stream) const {
  return std::max(stream_seconds_[stream], host_seconds_);
}

void Clock::wait(StreamId stream, double recorded_seconds) {
  stream_seconds_[stream] = std::max(stream_seconds_[stream], recorded_seconds);
}

void Clock::synchronize(double recorded_seconds) {
  host_seconds_ = std::max(host_seconds_, recorded_seconds);
}

void Clock::synchronize_all() {
  for (const double seconds : stream_seconds_) synchronize(seconds);
}

}  // namespace sim
