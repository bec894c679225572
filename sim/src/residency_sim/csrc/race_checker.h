// A happens-before checker over byte ranges. No torch in here.
//
// Every stream and the host carry a vector clock. An operation may touch a byte only if every
// earlier conflicting operation on that byte (two conflict when one of them writes) is in its past;
// what puts one operation into another's past is a stream's own order, an event waited for, or a
// synchronisation of the host. The verdict does not depend on when the simulator happened to run
// the work. Idea: torch/cuda/_sanitizer.py, which tracks one clock per data pointer; here it is per
// byte range, so that reused slots, slab entries and views are kept apart.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "streams.h"

namespace sim {

struct Access {
  uintptr_t begin;
  uintptr_t end;
  bool writes;
};

// How many operations of each stream are in the past.
using Past = std::array<uint64_t, kNumStreams>;

struct Operation {
  StreamId stream;
  uint64_t tick;  // its number on its stream
  std::string name;
  std::string line;  // of Python
};

struct Race : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class RaceChecker {
 public:
  // Throws Race when the operation conflicts with one that is not in its past; nothing is recorded
  // then.
  void operate(StreamId stream, std::string name, std::string line,
               const std::vector<Access>& accesses);

  Past record(StreamId stream);                      // what an event recorded now stands for
  void wait(StreamId stream, const Past& recorded);  // the stream waits for an event
  void synchronize(const Past& recorded);            // the host waits for an event
  void synchronize_all();
  void forget(uintptr_t begin, uintptr_t end);  // an allocator vouches for these bytes
  void reset();

 private:
  using Record = std::shared_ptr<const Operation>;
  struct Span {
    uintptr_t end;
    Record writer;
    std::vector<Record> readers;  // at most one a stream
  };
  using Spans = std::map<uintptr_t, Span>;

  void split(uintptr_t at);
  void check(const Operation& later, const Access& access) const;
  void note_read(const Record& operation, const Access& access);
  void note_write(const Record& operation, const Access& access);

  Spans spans_;
  std::array<Past, kNumStreams> pasts_{};
  Past host_{};
};

}  // namespace sim
