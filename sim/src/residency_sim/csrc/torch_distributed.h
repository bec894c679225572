// Collectives as work of the device: what was started on the host's threads, and how a stream comes
// to wait for it.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "torch_device.h"

namespace sim {

using Tensors = std::vector<at::Tensor>;
template <class T>
using Ptr = c10::intrusive_ptr<T>;

// One thread that runs what it is given in that order, as the stream of a communicator does.
class SerialThread {
 public:
  SerialThread() = default;
  SerialThread(const SerialThread&) = delete;
  SerialThread& operator=(const SerialThread&) = delete;
  ~SerialThread();  // after all that was submitted
  std::shared_future<void> submit(std::function<void()> job);

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<void()>> jobs_;
  bool is_ending_ = false;
  std::thread thread_;
};

// What a collective on the device returns. The bytes come from `finished`; `event` says from when
// on they may be used. It holds its tensors until a stream waits for it, as NCCL's does.
class DeviceWork final : public c10d::Work {
 public:
  struct Part {
    StreamId stream = kDefaultStream;
    Event event;
    std::shared_future<void> finished;
    Ptr<c10d::Work> host_work;  // of a receive, which knows where from
  };

  DeviceWork(c10d::OpType type, std::vector<Part> parts, Tensors inputs, Tensors outputs);
  ~DeviceWork() override;
  static Ptr<DeviceWork> join(const std::vector<Ptr<DeviceWork>>& works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  Tensors result() override { return outputs_; }
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  Ptr<c10::ivalue::Future> getFuture() override;

  bool has_finished() const;
  void await_bytes() const;

 private:
  std::vector<Part> parts_;
  Tensors inputs_;
  Tensors outputs_;
  bool was_waited_for_ = false;
};

// Keeps a work, and so its tensors, until its bytes are there or a caller has waited for it.
void keep_until_finished(const Ptr<DeviceWork>& work);
void let_go(const DeviceWork* work);

}  // namespace sim
