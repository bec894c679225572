// Simulated time. No torch in here.
//
// Every stream has a time at which its work so far ends, and so has each engine: the link to the
// device, the link to the host, and the compute units. An operation starts when its stream and its
// engine are free and the host has issued it; events carry times, and waits pass them on. Times are
// computed when work is issued, so they depend on the program alone, never on the schedule, the
// machine's load or the order in which the simulator happens to run the work.
#pragma once

#include <array>
#include <deque>

#include "streams.h"

namespace sim {

enum class Engine { kToDevice, kToHost, kCompute };

class Clock {
 public:
  explicit Clock(const Rates& rates) : rates_(rates) {}

  void copy(StreamId stream, Engine link, double num_bytes);
  void compute(StreamId stream, double num_bytes, double num_operations);

  double record(StreamId stream) const;  // the time that an event recorded now carries
  void wait(StreamId stream, double recorded_seconds);
  void synchronize(double recorded_seconds);  // the host waits
  void synchronize_all();
  double now_seconds() const { return host_seconds_; }

 private:
  struct Interval {
    double begin, end;  // [begin, end)
    StreamId stream;
  };

  double border(StreamId stream, const std::deque<Interval>& busy) const;
  double start(StreamId stream, Engine engine) const;
  void finish(StreamId stream, Engine engine, double end);
  double copy_end(double begin, double num_bytes, double rate, const std::deque<Interval>& other);

  Rates rates_;
  std::array<double, kNumStreams> stream_seconds_{};
  std::array<double, 3> engine_seconds_{};
  std::array<std::deque<Interval>, 2> link_busy_;  // recent intervals, in order
  double host_seconds_ = 0;
};

}  // namespace sim
