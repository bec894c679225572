#include "captures.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace sim {
namespace {

thread_local CaptureMode t_mode = CaptureMode::kGlobal;

// cudaError_t and cudaGetErrorString of it.
using Refusal = std::pair<int, const char*>;
constexpr Refusal kIllegalState{401, "the operation cannot be performed in the present state"};
constexpr Refusal kUnsupported{900, "operation not permitted when stream is capturing"};
constexpr Refusal kInvalidated{901, "operation failed due to a previous error during capture"};
constexpr Refusal kMerge{902, "operation would result in a merge of separate capture sequences"};
constexpr Refusal kUnmatched{903, "capture was not ended in the same stream as it began"};
constexpr Refusal kUnjoined{904, "capturing stream has unjoined work"};
constexpr Refusal kIsolation{905, "dependency created on uncaptured work in another stream"};
constexpr Refusal kCapturedEvent{
    907, "operation not permitted on an event last recorded in a capturing stream"};
constexpr Refusal kWrongThread{
    908, "attempt to terminate a thread-local capture sequence from another thread"};

[[noreturn]] void refuse(const Refusal& refusal) {
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, refusal.first,
                              std::string("CUDA error: ") + refusal.second + "\n");
}

void merge(CapturedPast& past, const CapturedPast& other) {
  for (const auto& [stream, count] : other) past[stream] = std::max(past[stream], count);
}

}  // namespace

Capture* Captures::find(StreamId stream) {
  for (Capture& capture : captures_) {
    if (capture.pasts.count(stream)) return &capture;
  }
  return nullptr;
}

Capture* Captures::with_id(CaptureId id) {
  for (Capture& capture : captures_) {
    if (capture.id == id) return &capture;
  }
  return nullptr;
}

CaptureId Captures::id_of(StreamId stream) {
  const Capture* capture = find(stream);
  return capture ? capture->id : 0;
}

CaptureId Captures::begin(StreamId stream, CaptureMode mode) {
  if (Capture* capture = find(stream)) {
    capture->is_invalid = true;
    refuse(kIllegalState);
  }
  captures_.push_back({++last_, stream, mode, std::this_thread::get_id()});
  captures_.back().pasts[stream];
  mark(stream);
  return last_;
}

Graph Captures::end(StreamId stream) {
  Capture* found = find(stream);
  if (!found) refuse(kIllegalState);
  if (found->mode != CaptureMode::kRelaxed && found->thread != std::this_thread::get_id()) {
    found->is_invalid = true;
    refuse(kWrongThread);
  }
  if (found->origin != stream) {
    found->is_invalid = true;
    refuse(kUnmatched);
  }
  const Capture capture = std::move(*found);
  captures_.remove_if([&](const Capture& each) { return each.id == capture.id; });
  for (const auto& [each, _] : capture.pasts) streams_ &= ~(uint64_t(1) << each);
  if (capture.is_invalid) refuse(kInvalidated);
  const CapturedPast& known = capture.pasts.at(stream);
  for (const auto& [each, past] : capture.pasts) {
    const auto count = past.find(each);
    if (count == past.end()) continue;  // it was given nothing
    const auto joined = known.find(each);
    if (joined == known.end() || joined->second < count->second) refuse(kUnjoined);
  }
  return capture.graph;
}

void Captures::add(StreamId stream, Graph::Piece piece) {
  Capture* capture = find(stream);
  if (!capture) return;  // ended by another thread
  if (capture->is_invalid) refuse(kInvalidated);
  capture->pasts[stream][stream]++;
  capture->graph.pieces.push_back(std::move(piece));
}

CapturedPast Captures::past_of(StreamId stream) { return find(stream)->pasts[stream]; }

void Captures::join(StreamId stream, CaptureId id, const CapturedPast& past) {
  Capture* capture = with_id(id);
  Capture* own = find(stream);
  if (!capture) {
    if (own) own->is_invalid = true;
    refuse(kCapturedEvent);
  }
  if (own && own != capture) {
    own->is_invalid = capture->is_invalid = true;
    refuse(kMerge);
  }
  if (capture->is_invalid) refuse(kInvalidated);
  merge(capture->pasts[stream], past);
  mark(stream);
}

void Captures::check_work_outside(StreamId waiter) {
  Capture* capture = find(waiter);
  if (!capture) return;
  capture->is_invalid = true;
  refuse(kIsolation);
}

void Captures::check_stream_wait(StreamId stream) {
  Capture* capture = find(stream);
  if (!capture) return;
  const bool was_invalid = std::exchange(capture->is_invalid, true);
  refuse(was_invalid ? kInvalidated : kUnsupported);
}

void Captures::check_device_wait() {
  if (captures_.empty()) return;
  for (Capture& capture : captures_) capture.is_invalid = true;
  refuse(kUnsupported);
}

void Captures::check_event_wait(CaptureId event) {
  if (event == 0) return;
  if (Capture* capture = with_id(event)) capture->is_invalid = true;
  refuse(kCapturedEvent);
}

void Captures::check_safe() {
  if (t_mode == CaptureMode::kRelaxed) return;
  bool is_prohibited = false;
  for (Capture& capture : captures_) {
    const bool is_own = capture.thread == std::this_thread::get_id();
    const bool minds = is_own ? capture.mode != CaptureMode::kRelaxed
                              : capture.mode == CaptureMode::kGlobal && t_mode == capture.mode;
    if (!minds) continue;
    capture.is_invalid = true;
    is_prohibited = true;
  }
  if (is_prohibited) refuse(kUnsupported);
}

CaptureMode Captures::exchange_mode(CaptureMode mode) { return std::exchange(t_mode, mode); }

}  // namespace sim
