// What the allocator remembers of what it did, for torch.cuda's recorded history: the latest
// events, with the stacks of the calls that led to them. Nothing is remembered until a caller
// asks for it.
//
// Source of the rules: c10/cuda/CUDACachingAllocator.cpp, `recordHistory` and `record_trace`.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "streams.h"
#include "torch_versions.h"

namespace sim {

using Stack = std::shared_ptr<c10::GatheredContext>;

// Which calls' stacks are kept; each keeps those before it, too. Those of blocks are kept for as
// long as the block is handed out, and not in events.
enum class StacksOf { kNothing, kBlocks, kAllocations, kFrees };

enum class Action {
  kAllocate,
  kRequestFree,
  kFree,
  kReserve,
  kRelease,
  kMap,
  kUnmap,
  kSnapshot,
  kOutOfMemory,
};

const char* name_of(Action action);
Action action_named(const std::string& name);  // raises where there is none

class History {
 public:
  struct Settings {
    bool is_on = false;
    StacksOf stacks = StacksOf::kNothing;
    Stack (*gather)() = nullptr;
    size_t max_entries = 1;
    std::set<Action> skipped = {};
  };
  struct Entry {
    Action action;
    size_t address;  // of kOutOfMemory: the bytes that are free on the device
    size_t size;     // of a block: the bytes that were asked for
    StreamId stream;
    PoolId pool;
    Stack stack;
    std::string metadata;
    int64_t time_us;
  };
  struct Annotation {  // a range of the program that begins or ends
    std::string name;
    bool begins;
    int64_t time_us;
  };

  void set(Settings settings, bool clear);
  bool is_on() const { return settings_.is_on; }
  void add(Action action, const void* address, size_t size, StreamId stream, PoolId pool,
           const Stack& stack);
  void annotate(const std::string& name, bool begins);
  const std::deque<Entry>& entries() const { return entries_; }
  const std::deque<Annotation>& annotations() const { return annotations_; }

  // A call of the allocator by this thread: what it does bears the stack from before the call.
  // Begun without locks, since the stack is the interpreter's.
  class Call {
   public:
    Call(const History& history, StacksOf calls) {
      if (history.gather_.load(std::memory_order_relaxed)) begin(history, calls);
    }
    ~Call() {
      if (has_begun_) end();
    }
    Call(const Call&) = delete;

   private:
    void begin(const History& history, StacksOf calls);
    void end();

    bool has_begun_ = false;
    Stack stack_;
    const Stack* before_ = nullptr;
  };
  static const Stack& stack();  // of this thread's call; empty where none is kept

  static std::string& metadata();  // that the events of this thread bear

 private:
  Settings settings_;
  std::atomic<StacksOf> stacks_ = StacksOf::kNothing;  // as in the settings, for `Call`
  std::atomic<Stack (*)()> gather_ = nullptr;
  std::deque<Entry> entries_;
  std::deque<Annotation> annotations_;
};

}  // namespace sim
