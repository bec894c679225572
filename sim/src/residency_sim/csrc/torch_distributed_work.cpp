// When a collective has finished, and for whom. The host's part runs on threads of its own, without
// the machine's lock and without the interpreter's.
#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <utility>

#include "torch_distributed.h"

namespace sim {
namespace {

struct Unfinished {
  std::mutex mutex;
  std::vector<Ptr<DeviceWork>> works;
};

// Never destroyed: at the end of the process a peer may be gone, and its collective never end.
Unfinished& unfinished() {
  static auto* instance = new Unfinished;
  return *instance;
}

bool is_ready(const std::shared_future<void>& future) {
  return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

// A synchronisation of the device waits for what the peers have yet to send. An error is left to
// the thread that waits for the work.
void await_all() {
  std::vector<Ptr<DeviceWork>> works;
  {
    std::lock_guard<std::mutex> guard(unfinished().mutex);
    works.swap(unfinished().works);
  }
  for (const auto& work : works) work->await_bytes();
}

}  // namespace

// ------------------------------------------------------------------------------------ the thread

SerialThread::~SerialThread() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_future<void> SerialThread::submit(std::function<void()> job) {
  std::packaged_task<void()> task(std::move(job));
  std::shared_future<void> finished = task.get_future().share();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    jobs_.push_back(std::move(task));
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  }
  changed_.notify_all();
  return finished;
}

void SerialThread::loop() {
  while (true) {
    std::packaged_task<void()> job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return is_ending_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
  }
}

// -------------------------------------------------------------------------------------- the work

DeviceWork::DeviceWork(c10d::OpType type, std::vector<Part> parts, Tensors inputs, Tensors outputs)
    : c10d::Work(-1, type),
      parts_(std::move(parts)),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)) {}

// Nothing orders the reuse of the memory after a work that only the allocator waited for.
DeviceWork::~DeviceWork() {
  if (was_waited_for_) return;
  for (const Part& part : parts_) {
    for (const Tensors* tensors : {&inputs_, &outputs_}) {
      for (const at::Tensor& tensor : *tensors) {
        Machine::get().record_stream(tensor.storage().data(), part.stream);
      }
    }
  }
}

Ptr<DeviceWork> DeviceWork::join(const std::vector<Ptr<DeviceWork>>& works) {
  std::vector<Part> parts;
  Tensors inputs;
  Tensors outputs;
  for (const auto& work : works) {
    parts.insert(parts.end(), work->parts_.begin(), work->parts_.end());
    inputs.insert(inputs.end(), work->inputs_.begin(), work->inputs_.end());
    outputs.insert(outputs.end(), work->outputs_.begin(), work->outputs_.end());
    let_go(work.get());
    work->was_waited_for_ = true;  // the joint one answers for its tensors from here on
  }
  return c10::make_intrusive<DeviceWork>(c10d::OpType::COALESCED, std::move(parts),
                                         std::move(inputs), std::move(outputs));
}

bool DeviceWork::has_finished() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const Part& p) { return is_ready(p.finished); });
}

void DeviceWork::await_bytes() const {
  for (const Part& part : parts_) part.finished.wait();
}

// As for an event that is found complete, the host is ordered after the work then.
bool DeviceWork::isCompleted() {
  if (!has_finished()) return false;
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return Machine::get().query(part.event); });
}

bool DeviceWork::isSuccess() const { return has_finished() && !exception(); }

std::exception_ptr DeviceWork::exception() const {
  for (const Part& part : parts_) {
    if (!is_ready(part.finished)) continue;
    try {
      part.finished.get();
    } catch (...) {
      return std::current_exception();
    }
  }
  return nullptr;
}

int DeviceWork::sourceRank() const {
  TORCH_CHECK(parts_.size() == 1 && parts_[0].host_work, "only a receive has a source rank");
  return parts_[0].host_work->sourceRank();
}

// The host waits for the bytes, since no lock may be held while peers are awaited; but what it may
// touch does not change by that: only the current stream is ordered after the work.
bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  for (const Part& part : parts_) {
    const bool has_limit = timeout != kNoTimeout && timeout.count() > 0;
    TORCH_CHECK(!has_limit || part.finished.wait_for(timeout) == std::future_status::ready,
                "the collective did not finish within ", timeout.count(), " ms");
    part.finished.get();
  }
  Machine& machine = Machine::get();
  for (const Part& part : parts_) {
    if (retrieveOpType() == c10d::OpType::BARRIER) {
      machine.synchronize(part.event);
    } else {
      machine.wait(Machine::current_stream(), part.event);
    }
  }
  was_waited_for_ = true;
  inputs_.clear();
  let_go(this);
  return true;
}

// Complete when it is returned, with an event on the work's stream: what waits for it waits there.
Ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  for (const Part& part : parts_) part.finished.get();
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{sim::device()});
  Machine& machine = Machine::get();
  for (const Part& part : parts_) machine.wait(parts_[0].stream, part.event);
  const StreamId previous = Machine::exchange_stream(parts_[0].stream);
  future->markCompleted(c10::IValue(outputs_));
  Machine::exchange_stream(previous);
  was_waited_for_ = true;
  let_go(this);
  return future;
}

void keep_until_finished(const Ptr<DeviceWork>& work) {
  static std::once_flag once;
  std::call_once(once, [] { Machine::get().set_before_synchronize(&await_all); });
  std::vector<Ptr<DeviceWork>> finished;  // their tensors die after the lock is let go
  std::lock_guard<std::mutex> guard(unfinished().mutex);
  auto& works = unfinished().works;
  auto first = std::partition(works.begin(), works.end(),
                              [](const auto& kept) { return !kept->has_finished(); });
  std::move(first, works.end(), std::back_inserter(finished));
  works.erase(first, works.end());
  works.push_back(work);
}

void let_go(const DeviceWork* work) {
  Ptr<DeviceWork> found;  // may hold the last reference: it dies after the lock is let go
  std::lock_guard<std::mutex> guard(unfinished().mutex);
  auto& works = unfinished().works;
  auto kept = std::find_if(works.begin(), works.end(),
                           [work](const auto& candidate) { return candidate.get() == work; });
  if (kept == works.end()) return;
  found = std::move(*kept);
  works.erase(kept);
}

}  // namespace sim
