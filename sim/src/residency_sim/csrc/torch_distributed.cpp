// `simccl`, the device's collectives: gloo on CPU aliases of the device's bytes, issued as NCCL
// issues them. An asynchronous collective belongs to a stream of its group, a synchronous one to
// the current stream, and either reads and writes its tensors there. Gloo itself runs on another
// thread, once the stream has reached the call.
#include <ATen/ops/div.h>
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "torch_distributed.h"
#include "torch_readings.h"
#include "torch_versions.h"

namespace sim {
namespace {

using at::Tensor;
using c10d::OpType;
using Lists = std::vector<Tensors>;
using Gloo = Ptr<c10d::Backend>;

constexpr int kAnyRank = -1;

Tensors flat(const Lists& lists) {
  Tensors tensors;
  for (const Tensors& list : lists) tensors.insert(tensors.end(), list.begin(), list.end());
  return tensors;
}

// Host tensors over the device's bytes. In dry mode they are meta tensors, and are not looked at.
class Hosts {
 public:
  Tensor of(const Tensor& tensor) {
    TORCH_CHECK(is_sim(tensor), face().backend, " takes dense tensors of ", face().device_label,
                "; found one on ", tensor.device(), ". Initialize the group with \"cpu:gloo,",
                c10::DeviceTypeName(face().device, true), ":", face().backend, "\" for both.");
    return aliases_.of(tensor);
  }
  Tensors of(const Tensors& tensors) {
    Tensors hosts;
    for (const Tensor& tensor : tensors) hosts.push_back(of(tensor));
    return hosts;
  }
  Lists of(const Lists& lists) {
    Lists hosts;
    for (const Tensors& list : lists) hosts.push_back(of(list));
    return hosts;
  }

 private:
  Aliases aliases_{Machine::get().settings().dry};
};

// Gloo cannot average or scale: it sums, and what was to be done to each term is done to the sum.
class Scaling {
 public:
  template <class Options>
  Scaling(Options& options, int num_ranks) {
    c10d::ReduceOp& op = options.reduceOp;
    const bool averages = op == c10d::ReduceOp::AVG;
    const bool multiplies = op == c10d::ReduceOp::PREMUL_SUM;
    if (averages) divisor_ = num_ranks;
    if (multiplies) {
      const auto* premul = static_cast<c10d::RESIDENCY_PREMUL_SUM*>(op.supplement_.get());
      factor_ = premul->tensor_factor.defined() ? premul->tensor_factor.item<double>()
                                                : premul->double_factor;
    }
    if (averages || multiplies) op = c10d::ReduceOp::SUM;  // by 1, too
  }
  void apply(const Tensor& sum) const {
    if (divisor_ == 1 && factor_ == 1.0) return;
    as_device_work([&] {
      Tensor result = sum;
      if (factor_ != 1.0) {
        result.mul_(factor_);
      } else if (c10::isIntegralType(sum.scalar_type(), false)) {
        result.div_(divisor_, "trunc");
      } else {
        result.div_(divisor_);
      }
    });
  }

 private:
  int divisor_ = 1;
  double factor_ = 1.0;
};

// NCCL moves values, in whatever shapes they stand on the two sides; Gloo compares these.
Tensor in_one_row(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor.view({-1}) : tensor;
}

struct Collective {
  OpType type;
  const char* name;
  bool is_async;
  Tensors reads;
  Tensors writes;
};

class Simccl final : public c10d::Backend {
 public:
  explicit Simccl(Gloo gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return face().backend; }
  Ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  // In dry mode the group may have no peers, and there are no calls to be numbered alike.
  void setSequenceNumberForGroup() override {
    if (!is_dry()) gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return is_dry() ? 0 : gloo_->getSequenceNumberForGroup();
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalesced_.emplace(); }
  Ptr<c10d::Work> endCoalescing() override {
    TORCH_CHECK(coalesced_, "endCoalescing without startCoalescing");
    auto works = std::exchange(coalesced_, std::nullopt);
    auto work = DeviceWork::join(*works);
    keep_until_finished(work);
    return work;
  }

  // ------------------------------------------------------------------------------ one to all

  Ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const bool is_root = getRank() == options.rootRank;
    return collect({OpType::BROADCAST, "broadcast", options.asyncOp, is_root ? tensors : Tensors{},
                    is_root ? Tensors{} : tensors},
                   [gloo = gloo_, hosts = Hosts().of(tensors), options]() mutable {
                     gloo->broadcast(hosts, options)->wait();
                   });
  }

  Ptr<c10d::Work> scatter(Tensors& outputs, Lists& inputs,
                          const c10d::ScatterOptions& options) override {
    Hosts hosts;
    return collect({OpType::SCATTER, "scatter", options.asyncOp, flat(inputs), outputs},
                   [gloo = gloo_, to = hosts.of(outputs), from = hosts.of(inputs),
                    options]() mutable { gloo->scatter(to, from, options)->wait(); });
  }

  // ------------------------------------------------------------------------------ all to one

  Ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& original) override {
    c10d::ReduceOptions options = original;
    const Scaling scaling(options, getSize());
    const bool is_root = getRank() == options.rootRank;
    return collect(
        {OpType::REDUCE, "reduce", options.asyncOp, tensors, is_root ? tensors : Tensors{}},
        [gloo = gloo_, hosts = Hosts().of(tensors), options, scaling, is_root]() mutable {
          // Gloo reduces in place everywhere; NCCL leaves the others' tensors alone.
          if (!is_root) hosts = {hosts[0].clone()};
          gloo->reduce(hosts, options)->wait();
          if (is_root) scaling.apply(hosts[0]);
        });
  }

  Ptr<c10d::Work> gather(Lists& outputs, Tensors& inputs,
                         const c10d::GatherOptions& options) override {
    Hosts hosts;
    return collect({OpType::GATHER, "gather", options.asyncOp, inputs, flat(outputs)},
                   [gloo = gloo_, to = hosts.of(outputs), from = hosts.of(inputs),
                    options]() mutable { gloo->gather(to, from, options)->wait(); });
  }

  // ------------------------------------------------------------------------------ all reduce

  Ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduce_everywhere(OpType::ALLREDUCE, "all_reduce", tensors, options);
  }

  Ptr<c10d::Work> allreduce_coalesced(Tensors& tensors,
                                      const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_everywhere(OpType::ALLREDUCE_COALESCED, "all_reduce", tensors, options);
  }

  Ptr<c10d::Work> reduce_scatter(Tensors& outputs, Lists& inputs,
                                 const c10d::ReduceScatterOptions& original) override {
    c10d::ReduceScatterOptions options = original;
    const Scaling scaling(options, getSize());
    Hosts hosts;
    return collect(
        {OpType::REDUCE_SCATTER, "reduce_scatter", options.asyncOp, flat(inputs), outputs},
        [gloo = gloo_, to = hosts.of(outputs), from = hosts.of(inputs), options,
         scaling]() mutable {
          gloo->reduce_scatter(to, from, options)->wait();
          for (const Tensor& tensor : to) scaling.apply(tensor);
        });
  }

  Ptr<c10d::Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                       const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output};
    Tensors inputs{input};
    return scatter_sums(OpType::_REDUCE_SCATTER_BASE, outputs, inputs, options);
  }

  Ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return scatter_sums(OpType::RESIDENCY_SCATTER_COALESCED, outputs, inputs, options);
  }

  // ------------------------------------------------------------------------------ all to all

  Ptr<c10d::Work> allgather(Lists& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options) override {
    Hosts hosts;
    return collect({OpType::ALLGATHER, "all_gather", options.asyncOp, inputs, flat(outputs)},
                   [gloo = gloo_, to = hosts.of(outputs), from = hosts.of(inputs),
                    options]() mutable { gloo->allgather(to, from, options)->wait(); });
  }

  Ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input,
                                  const c10d::AllgatherOptions& options) override {
    Tensors outputs{output};
    Tensors inputs{input};
    return gather_everywhere(OpType::_ALLGATHER_BASE, outputs, inputs, options);
  }

  Ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) override {
    return gather_everywhere(OpType::ALLGATHER_COALESCED, outputs, inputs, options);
  }

  Ptr<c10d::Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                                std::vector<int64_t>& input_sizes,
                                const c10d::AllToAllOptions& options) override {
    Hosts hosts;
    return collect({OpType::ALLTOALL_BASE, "all_to_all", options.asyncOp, {input}, {output}},
                   [gloo = gloo_, to = hosts.of(output), from = hosts.of(input), output_sizes,
                    input_sizes, options]() mutable {
                     gloo->alltoall_base(to, from, output_sizes, input_sizes, options)->wait();
                   });
  }

  Ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs,
                           const c10d::AllToAllOptions& options) override {
    Hosts hosts;
    return collect({OpType::ALLTOALL, "all_to_all", options.asyncOp, inputs, outputs},
                   [gloo = gloo_, to = hosts.of(outputs), from = hosts.of(inputs),
                    options]() mutable { gloo->alltoall(to, from, options)->wait(); });
  }

  Ptr<c10d::Work> barrier(const c10d::BarrierOptions& original) override {
    c10d::BarrierOptions options = original;
    options.device_ids.clear();
    options.device.reset();
    return collect({OpType::BARRIER, "barrier", options.asyncOp, {}, {}},
                   [gloo = gloo_, options] { gloo->barrier(options)->wait(); });
  }

  // ---------------------------------------------------------------------------- one to one

  Ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    return exchange({OpType::SEND, "send", true, tensors, {}}, to,
                    [this, hosts = Hosts().of(tensors), to, tag]() mutable {
                      return gloo_->send(hosts, to, tag);
                    });
  }

  Ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return exchange({OpType::RECV, "recv", true, {}, tensors}, from,
                    [this, hosts = Hosts().of(tensors), from, tag]() mutable {
                      return gloo_->recv(hosts, from, tag);
                    });
  }

  Ptr<c10d::Work> recvAnysource(Tensors& tensors, int tag) override {
    return exchange({OpType::RECVANYSOURCE, "recv", true, {}, tensors}, kAnyRank,
                    [this, hosts = Hosts().of(tensors), tag]() mutable {
                      return gloo_->recvAnysource(hosts, tag);
                    });
  }

 private:
  Ptr<c10d::Work> reduce_everywhere(OpType type, const char* name, Tensors& tensors,
                                    c10d::AllreduceOptions options) {
    const Scaling scaling(options, getSize());
    return collect({type, name, options.asyncOp, tensors, tensors},
                   [gloo = gloo_, hosts = Hosts().of(tensors), options, scaling] {
                     for (const Tensor& host : hosts) {
                       Tensors one{host};
                       gloo->allreduce(one, options)->wait();
                       scaling.apply(host);
                     }
                   });
  }

  Ptr<c10d::Work> scatter_sums(OpType type, Tensors& outputs, Tensors& inputs,
                               c10d::ReduceScatterOptions options) {
    const Scaling scaling(options, getSize());
    Hosts hosts;
    return collect({type, "reduce_scatter", options.asyncOp, inputs, outputs},
                   [gloo = gloo_, to = hosts.of(outputs), from = hosts.of(inputs), options,
                    scaling]() mutable {
                     for (size_t i = 0; i < to.size(); i++) {
                       Tensor output = in_one_row(to[i]);
                       Tensor input = in_one_row(from[i]);
                       gloo->_reduce_scatter_base(output, input, options)->wait();
                       scaling.apply(to[i]);
                     }
                   });
  }

  Ptr<c10d::Work> gather_everywhere(OpType type, Tensors& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
    Hosts hosts;
    return collect(
        {type, "all_gather", options.asyncOp, inputs, outputs},
        [gloo = gloo_, to = hosts.of(outputs), from = hosts.of(inputs), options]() mutable {
          for (size_t i = 0; i < to.size(); i++) {
            Tensor output = in_one_row(to[i]);
            Tensor input = in_one_row(from[i]);
            gloo->_allgather_base(output, input, options)->wait();
          }
        });
  }

  // A collective of the group: after those issued before it, on the host and on the device.
  Ptr<c10d::Work> collect(Collective&& call, std::function<void()> job) {
    const StreamId stream = call.is_async ? stream_for(kCollectives) : Machine::current_stream();
    DeviceWork::Part part = submit(call, stream);
    part.finished = is_dry() ? done() : thread_.submit(std::move(job));
    return hand_over(std::move(call), std::move(part));
  }

  // Between two ranks: each peer has a stream of its own, as on NCCL, so that both sides may send
  // first and receive then. Gloo begins at once, in the order of the calls.
  template <class Start>
  Ptr<c10d::Work> exchange(Collective&& call, int peer, Start start) {
    DeviceWork::Part part = submit(call, stream_for(peer));
    if (is_dry()) {
      part.finished = done();
    } else {
      part.host_work = start();
      part.finished =
          std::async(std::launch::async, [work = part.host_work] { work->wait(); }).share();
    }
    return hand_over(std::move(call), std::move(part));
  }

  // Issues the call on its stream, and runs that stream so far: the inputs are finished then.
  DeviceWork::Part submit(const Collective& call, StreamId stream) {
    Machine& machine = Machine::get();
    const StreamId current = Machine::current_stream();
    TORCH_CHECK(!machine.is_capturing(),
                "The simulated accelerator does not model collectives in a graph: ", call.name);
    if (stream != current) {
      Event ready;
      machine.record(ready, current);
      machine.wait(stream, ready);
    }
    Launch launch{call.name, {}};
    if (machine.checks_races()) {
      for (const Tensor& tensor : call.reads) add_accesses(launch.accesses, tensor, false);
      for (const Tensor& tensor : call.writes) add_accesses(launch.accesses, tensor, true);
    }
    struct StreamScope {
      explicit StreamScope(StreamId stream) : previous(Machine::exchange_stream(stream)) {}
      ~StreamScope() { Machine::exchange_stream(previous); }
      StreamId previous;
    } scope(stream);
    machine.launch(std::move(launch), [] {});
    if (is_dry()) note_collective(call.reads, call.writes);
    DeviceWork::Part part;
    part.stream = stream;
    machine.record(part.event, stream);
    return part;
  }

  Ptr<c10d::Work> hand_over(Collective&& call, DeviceWork::Part&& part) {
    auto work = c10::make_intrusive<DeviceWork>(call.type, std::vector{std::move(part)},
                                                std::move(call.reads), std::move(call.writes));
    keep_until_finished(work);
    if (coalesced_) {
      coalesced_->push_back(work);
    } else if (!call.is_async) {
      work->wait();
    }
    return work;
  }

  StreamId stream_for(int peer) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto [found, is_new] = streams_.try_emplace(peer, kDefaultStream);
    if (is_new) found->second = Machine::get().create_stream();
    return found->second;
  }

  static bool is_dry() { return Machine::get().settings().dry; }
  static std::shared_future<void> done() {
    std::promise<void> promise;
    promise.set_value();
    return promise.get_future().share();
  }

  static constexpr int kCollectives = -2;  // a peer that is all of them

  Gloo gloo_;
  std::mutex mutex_;
  std::map<int, StreamId> streams_;
  std::optional<std::vector<Ptr<DeviceWork>>> coalesced_;
  SerialThread thread_;
};

}  // namespace

void register_distributed(pybind11::module& module) {
  // The methods are those that torch calls on the class ProcessGroupNCCL and on no other.
  pybind11::class_<Simccl, Ptr<Simccl>, c10d::Backend>(module, "Simccl")
      .def(pybind11::init([](const Gloo& gloo) { return c10::make_intrusive<Simccl>(gloo); }))
      .def_property_readonly("uid", [](const Simccl&) { return 0; })
      .def("_add_ephemeral_timeout", [](const Simccl&, std::chrono::milliseconds) {})
      .def("_set_default_timeout", [](const Simccl&, std::chrono::milliseconds) {})
      .def("_group_start", [](const Simccl&) {})
      .def("_group_end", [](const Simccl&) {});
}

}  // namespace sim
