#include "history.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

namespace sim {
namespace {

// The names in torch's snapshots, in the order of the actions.
constexpr std::array kNames = {"alloc",         "free_requested", "free_completed",
                               "segment_alloc", "segment_free",   "segment_map",
                               "segment_unmap", "snapshot",       "oom"};

thread_local const Stack* t_stack = nullptr;

int64_t now_us() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

template <class Entries, class Entry>
void add_to(Entries& entries, size_t max_entries, Entry&& entry) {
  while (!entries.empty() && entries.size() >= max_entries) entries.pop_front();
  entries.push_back(std::forward<Entry>(entry));
}

}  // namespace

const char* name_of(Action action) { return kNames[static_cast<size_t>(action)]; }

Action action_named(const std::string& name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  TORCH_CHECK(found != kNames.end(), "Unknown TraceEntry action: ", name);
  return static_cast<Action>(found - kNames.begin());
}

void History::set(Settings settings, bool clear) {
  settings_ = std::move(settings);
  settings_.max_entries = std::max<size_t>(settings_.max_entries, 1);
  if (!settings_.is_on) settings_.stacks = StacksOf::kNothing;
  stacks_ = settings_.stacks;
  gather_ = settings_.stacks == StacksOf::kNothing ? nullptr : settings_.gather;
  if (settings_.is_on && !clear) return;
  entries_.clear();
  annotations_.clear();
}

void History::add(Action action, const void* address, size_t size, StreamId stream, PoolId pool,
                  const Stack& stack) {
  if (settings_.skipped.count(action)) return;
  const bool keeps_stack = settings_.stacks >= StacksOf::kAllocations;
  add_to(entries_, settings_.max_entries,
         Entry{action, reinterpret_cast<size_t>(address), size, stream, pool,
               keeps_stack ? stack : Stack(), metadata(), now_us()});
}

void History::annotate(const std::string& name, bool begins) {
  if (!is_on()) return;
  add_to(annotations_, settings_.max_entries, Annotation{name, begins, now_us()});
}

void History::Call::begin(const History& history, StacksOf calls) {
  auto* gather = history.gather_.load();
  if (gather && history.stacks_ >= calls) stack_ = gather();
  has_begun_ = true;
  before_ = std::exchange(t_stack, &stack_);
}

void History::Call::end() { t_stack = before_; }

const Stack& History::stack() {
  static const Stack none;
  return t_stack ? *t_stack : none;
}

std::string& History::metadata() {
  thread_local std::string text;
  return text;
}

}  // namespace sim
