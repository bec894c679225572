#include "race_checker.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace sim {
namespace {

void merge(Past& into, const Past& other) {
  for (size_t i = 0; i < into.size(); i++) into[i] = std::max(into[i], other[i]);
}

std::string describe(const Operation& operation) {
  std::ostringstream text;
  text << "'" << operation.name << "' on stream " << operation.stream << " (" << operation.line
       << ")";
  return text.str();
}

[[noreturn]] void raise(const Operation& later, bool writes, const Operation& earlier, bool wrote,
                        uintptr_t begin, uintptr_t end) {
  std::ostringstream text;
  text << "race on " << end - begin << " bytes at 0x" << std::hex << begin << std::dec << ": "
       << describe(later) << (writes ? " writes" : " reads") << " what " << describe(earlier)
       << (wrote ? " writes" : " reads")
       << ", and nothing orders the first after the second. Record an event on stream "
       << earlier.stream << " after the second and make stream " << later.stream
       << " wait for it before the first";
  if (!wrote && later.name == "allocation")
    text << ", or call record_stream before the tensor is freed";
  text << ".";
  throw Race(text.str());
}

}  // namespace

Past RaceChecker::record(StreamId stream) {
  merge(pasts_[stream], host_);
  return pasts_[stream];
}

void RaceChecker::wait(StreamId stream, const Past& recorded) { merge(pasts_[stream], recorded); }

void RaceChecker::synchronize(const Past& recorded) { merge(host_, recorded); }

void RaceChecker::synchronize_all() {
  for (const Past& clock : pasts_) merge(host_, clock);
}

void RaceChecker::reset() { *this = RaceChecker(); }

// Makes `at` a boundary between spans, if it lies inside one.
void RaceChecker::split(uintptr_t at) {
  auto next = spans_.upper_bound(at);
  if (next == spans_.begin()) return;
  auto span = std::prev(next);
  if (span->first == at || span->second.end <= at) return;
  Span tail = span->second;
  span->second.end = at;
  spans_.emplace_hint(next, at, std::move(tail));
}

void RaceChecker::check(const Operation& later, const Access& access) const {
  const Past& past = pasts_[later.stream];
  auto unordered = [&](const Record& earlier) {
    return earlier && earlier->stream != later.stream && earlier->tick > past[earlier->stream];
  };
  auto span = spans_.upper_bound(access.begin);
  if (span != spans_.begin() && std::prev(span)->second.end > access.begin) --span;
  for (; span != spans_.end() && span->first < access.end; ++span) {
    const uintptr_t begin = std::max(access.begin, span->first);
    const uintptr_t end = std::min(access.end, span->second.end);
    if (unordered(span->second.writer)) {
      raise(later, access.writes, *span->second.writer, true, begin, end);
    }
    if (!access.writes) continue;
    for (const Record& reader : span->second.readers) {
      if (unordered(reader)) raise(later, true, *reader, false, begin, end);
    }
  }
}

void RaceChecker::note_write(const Record& operation, const Access& access) {
  forget(access.begin, access.end);
  spans_.emplace(access.begin, Span{access.end, operation, {}});
}

void RaceChecker::note_read(const Record& operation, const Access& access) {
  split(access.begin);
  split(access.end);
  uintptr_t cursor = access.begin;
  for (auto span = spans_.lower_bound(access.begin); cursor < access.end; ++span) {
    const bool is_gap = span == spans_.end() || span->first > cursor;
    if (is_gap) {  // bytes that nothing has touched so far
      const uintptr_t end = span == spans_.end() ? access.end : std::min(access.end, span->first);
      span = spans_.emplace_hint(span, cursor, Span{end, nullptr, {operation}});
    } else {
      auto& readers = span->second.readers;
      auto same = std::find_if(readers.begin(), readers.end(),
                               [&](const Record& r) { return r->stream == operation->stream; });
      if (same == readers.end()) {
        readers.push_back(operation);
      } else {
        *same = operation;
      }
    }
    cursor = span->second.end;
  }
}

void RaceChecker::operate(StreamId stream, std::string name, std::string line,
                          const std::vector<Access>& accesses) {
  Past& clock = pasts_[stream];
  merge(clock, host_);
  auto operation = std::make_shared<Operation>(
      Operation{stream, clock[stream] + 1, std::move(name), std::move(line)});
  for (const Access& access : accesses) check(*operation, access);
  clock[stream]++;
  for (const Access& access : accesses) {
    if (!access.writes) note_read(operation, access);
  }
  for (const Access& access : accesses) {
    if (access.writes) note_write(operation, access);
  }
}

void RaceChecker::forget(uintptr_t begin, uintptr_t end) {
  split(begin);
  split(end);
  spans_.erase(spans_.lower_bound(begin), spans_.lower_bound(end));
}

}  // namespace sim
