// Captures of streams into graphs: which streams are captured, what they were given, and what the
// program may not do meanwhile. No torch in here but its error.
//
// Source of the rules: CUDA's programming guide, "Creating a Graph Using Stream Capture" with its
// "Prohibited and Unhandled Operations", and the reference of cudaThreadExchangeStreamCaptureMode.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "race_checker.h"
#include "clock.h"
#include "streams.h"

namespace sim {

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

// What was captured, in the order in which it was issued: an order that all its waits allow.
struct Graph {
  // Called by each replay: takes the random numbers of this time, and returns the work.
  using Issue = std::function<std::function<void()>()>;
  struct Piece {
    Launch launch;
    Issue issue;
  };
  std::vector<Piece> pieces;
};

// Which other calls end a capture with an error, in cudart's order: those of all threads that may
// be unsafe, those of its own thread, or none.
enum class CaptureMode { kGlobal, kThreadLocal, kRelaxed };

using CaptureId = uint64_t;                         // 0: none
using CapturedPast = std::map<StreamId, uint64_t>;  // how much of each stream comes before

struct Capture {
  CaptureId id;
  StreamId origin;
  CaptureMode mode;
  std::thread::id thread;
  bool is_invalid = false;
  std::map<StreamId, CapturedPast> pasts;  // of each stream that belongs to it
  Graph graph;
};

// Every method that throws has invalidated the captures in question, as on CUDA.
class Captures {
 public:
  // Needs no lock: an operation's fast path asks it.
  bool is_captured(StreamId stream) const { return streams_ >> stream & 1; }
  bool is_any() const { return streams_ != 0; }
  CaptureId id_of(StreamId stream);

  CaptureId begin(StreamId stream, CaptureMode mode);
  Graph end(StreamId stream);
  void add(StreamId stream, Graph::Piece piece);
  CapturedPast past_of(StreamId stream);
  // A stream that waits for an event that was recorded in a capture belongs to the capture.
  void join(StreamId stream, CaptureId id, const CapturedPast& past);

  void check_work_outside(StreamId waiter);  // that a stream would wait for
  void check_stream_wait(StreamId stream);   // of the host
  void check_device_wait();
  void check_event_wait(CaptureId event);  // and a query
  void check_safe();                       // a call that may be unsafe, by this thread
  // This thread's own mode, which says of which captures it may not make such calls.
  static CaptureMode exchange_mode(CaptureMode mode);

 private:
  Capture* find(StreamId stream);
  Capture* with_id(CaptureId id);
  void mark(StreamId stream) { streams_ |= uint64_t(1) << stream; }

  std::list<Capture> captures_;
  CaptureId last_ = 0;
  std::atomic<uint64_t> streams_ = 0;  // one bit for each that is captured
};

}  // namespace sim
