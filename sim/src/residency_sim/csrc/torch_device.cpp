// Registers the simulated machine with torch as a device: allocators, the device guard (streams and
// events) and the accelerator hooks.
#include "torch_device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/resize_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <atomic>
#include <cstring>

#include "fork.h"
#include "torch_generator.h"

namespace sim {
namespace {

// In the words of CUDA's allocator, which has one for each device.
void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index < num_devices(), "Invalid device argument ", static_cast<int>(index),
              ": did you call init? There are ", num_devices(), " simulated accelerators.");
}

bool is_machine(int index) { return index < 0 || index == machine_index(); }

// ------------------------------------------------------------------------------------- allocators

std::atomic<bool> is_initialized = false;  // by torch.cuda, which is so at its first use

struct TorchAllocator final : c10::DeviceAllocator {
  static void deallocate(void* address) {
    if (address && !is_in_bad_fork()) Machine::get().free(address);
  }
  at::DataPtr allocate(size_t num_bytes) override {
    void* address = num_bytes ? Machine::get().allocate(num_bytes) : nullptr;
    return {address, address, &deallocate, sim::device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    copy_on_device(to, from, num_bytes);
  }
  // Where it is not, all figures are 0.
  bool initialized() override { return (!face().is_cuda || is_initialized) && !is_in_bad_fork(); }
  void emptyCache(c10::MempoolId_t pool) override {
    if (!is_in_bad_fork()) Machine::get().empty_cache(pool);
  }
  void recordStream(const at::DataPtr& pointer, c10::Stream stream) override {
    Machine::get().record_stream(pointer.get(), stream.id());
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_index(device);
    if (!is_machine(device)) return {};
    return Machine::get().with_allocator([](CachingAllocator& allocator) {
      DeviceStats stats = allocator.stats();
      stats.max_split_size =
          static_cast<int64_t>(c10::CachingAllocator::AcceleratorAllocatorConfig::max_split_size());
      show_private_pools(stats, allocator.pool_figures());
      return stats;
    });
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    check_index(device);
    if (!is_machine(device)) return;
    Machine::get().with_allocator([](CachingAllocator& allocator) {
      DeviceStats& stats = allocator.stats();
      for_each_stat(allocator, [](auto& stat) { stat.reset_accumulated(); });
      stats.num_alloc_retries = stats.num_ooms = stats.num_sync_all_streams = 0;
      stats.num_device_alloc = stats.num_device_free = 0;
    });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    check_index(device);
    if (!is_machine(device)) return;
    Machine::get().with_allocator([](CachingAllocator& allocator) {
      for_each_stat(allocator, [](auto& stat) { stat.reset_peak(); });
    });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    check_device_index(device);
    return Machine::get().free_and_total_bytes(device < 0 ? current_device() : device);
  }

  template <class Apply>
  static void for_each_stat(CachingAllocator& allocator, Apply apply) {
    DeviceStats& stats = allocator.stats();
    for (auto* array : {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split,
                        &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                        &stats.inactive_split_bytes, &stats.requested_bytes}) {
      for (auto& stat : *array) apply(stat);
    }
    for (auto& [_, figures] : allocator.pool_figures()) {
      for (auto& stat : figures) apply(stat);
    }
    apply(stats.oversize_allocations);
    apply(stats.oversize_segments);
  }
};

struct TorchPinnedAllocator final : at::HostAllocator {
  static void deallocate(void* address) {
    if (!is_in_bad_fork()) Machine::get().free_pinned(address);
  }
  at::DataPtr allocate(size_t num_bytes) override {
    void* address = Machine::get().allocate_pinned(num_bytes);
    return {address, address, &deallocate, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
  bool record_event(void* address, void* context, c10::Stream stream) override {
    return Machine::get().record_pinned_use({address, context}, stream.id());
  }
  void empty_cache() override { Machine::get().empty_pinned_cache(); }
  at::HostStats get_stats() override {
    const HostStatistics ours = Machine::get().pinned_statistics();
    at::HostStats stats;
    stats.allocations = ours.allocations;
    stats.allocated_bytes = ours.allocated_bytes;
    stats.active_requests = ours.active_requests;
    stats.active_bytes = ours.active_bytes;
    stats.host_alloc_time = ours.alloc_time;
    stats.host_free_time = ours.free_time;
    stats.num_host_alloc = ours.allocations.allocated;
    stats.num_host_free = ours.allocations.freed;
    return stats;
  }
  void reset_accumulated_stats() override { Machine::get().reset_accumulated_pinned_statistics(); }
  void reset_peak_stats() override { Machine::get().reset_peak_pinned_statistics(); }
};

TorchAllocator device_allocator_instance;
TorchPinnedAllocator pinned_allocator_instance;

// ----------------------------------------------------------------------------- streams and events

struct TorchGuard final : c10::impl::DeviceGuardImplInterface {
  // The machine's; other devices have their default stream alone.
  static c10::Stream stream_of(StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, sim::device(), id);
  }
  static c10::Stream default_of(c10::Device device) {
    return c10::Stream(c10::Stream::UNSAFE, device, kDefaultStream);
  }
  static Event& event_at(void* event) { return *static_cast<Event*>(event); }
  static c10::Device device_at(int index) {
    return {face().device, static_cast<c10::DeviceIndex>(index)};
  }

  c10::DeviceType type() const override { return face().device; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_at(exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    maybe_set_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(num_devices());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    return is_machine(device.index()) ? stream_of(Machine::current_stream()) : default_of(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return device.has_index() ? default_of(device) : stream_of(kDefaultStream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    place_on(device);
    return stream_of(Machine::get().create_stream());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    if (!is_machine(stream.device_index())) return default_of(stream.device());
    return stream_of(Machine::exchange_stream(stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(stream.id() + 1));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return !is_machine(stream.device_index()) || Machine::get().is_stream_done(stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (!is_machine(stream.device_index()))
      return Machine::get().use_context_on(stream.device_index());
    Machine::get().synchronize_stream(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const int index = device < 0 ? current_device() : device;
    const WithDevice with(index);
    Machine::get().use_context_on(index);
    if (is_machine(index)) Machine::get().synchronize();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    device_allocator_instance.recordStream(pointer, stream);
  }

  // Of a device that is not the machine nothing is under way: its events are done.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    const WithDevice with(stream.device_index());
    Machine::get().use_context_on(stream.device_index());
    if (!*event) *event = new Event;
    if (is_machine(stream.device_index())) Machine::get().record(event_at(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    const WithDevice with(stream.device_index());
    if (is_machine(stream.device_index())) Machine::get().wait(stream.id(), event_at(event));
  }
  bool queryEvent(void* event) const override {
    return !event || Machine::get().query(event_at(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) Machine::get().synchronize(event_at(event));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return Machine::get().seconds_between(event_at(first), event_at(second)) * 1e3;
  }
  // "That's where rank 1, 2, ... can create extra context on device 0" (pytorch#135273): the last
  // reference may be let go by a thread that never chose a device.
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (!event) return;
    try {
      const WithDevice with(device);
    } catch (...) {  // CUDA's warns
    }
    delete static_cast<Event*>(event);
  }
};

// ------------------------------------------------------------------------------------------ hooks

template <class Interface>
struct AcceleratorHooks : Interface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return has_context(index); }
  void init() const override {
    use_device();
    is_initialized = true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(num_devices());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(maybe_exchange_device(index));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  bool isPinnedPtr(const void* address) const override { return Machine::get().is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator_instance; }
  at::Device getDeviceFromPtr(void* address) const override {
    TORCH_CHECK(Machine::get().is_device_address(address), "the pointer is not one of ",
                face().device_label, "'s");
    return sim::device();
  }
};

struct CudaHooks final : AcceleratorHooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator_instance; }
  std::string showConfig() const override { return "  - CUDA as simulated by residency\n"; }
  int getNumGPUs() const override { return num_devices(); }
  void deviceSynchronize(c10::DeviceIndex index) const override {
    TorchGuard().synchronizeDevice(index);
  }
};

// Torch makes its hooks at the first question that it has about CUDA, and keeps them. Neither its
// class nor ours has data of its own, so that an object becomes the other's by its table of virtual
// functions.
void install_cuda_hooks() {
  static auto* hooks = new CudaHooks;
  static_assert(sizeof(CudaHooks) == sizeof(void*));
  auto& installed = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(&installed), static_cast<void*>(hooks), sizeof(void*));
}

// DistributedDataParallel measures itself, and on CUDA insists on it; torch's own timer records
// CUDA's events.
struct HostTimer final : c10d::Timer {
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start);
    const auto to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

void install_cuda_timer() {
  c10d::TimerRegistry()->Register(
      face().device, [](c10::Device) { return std::make_unique<HostTimer>(); },
      c10::REGISTRY_PREFERRED);
}

struct SimHooks final : AcceleratorHooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

void install_sim_hooks() {
  static auto* hooks = new SimHooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace

void place_on(std::optional<c10::Device> device) {
  place_machine(device && device->has_index() ? device->index() : current_device());
}

c10::Allocator* device_allocator() { return &device_allocator_instance; }

void copy_on_device(void* to, const void* from, size_t num_bytes) {
  Machine& machine = Machine::get();
  Launch launch{"copy of bytes", {}, /*may_wait=*/true};
  launch.num_bytes = static_cast<double>(num_bytes);
  if (machine.checks_races()) {
    const auto source = reinterpret_cast<uintptr_t>(from);
    const auto target = reinterpret_cast<uintptr_t>(to);
    launch.accesses = {{source, source + num_bytes, false}, {target, target + num_bytes, true}};
  }
  if (machine.settings().dry) return machine.observe(std::move(launch));
  machine.launch(std::move(launch), [=] { std::memcpy(to, from, num_bytes); });
}

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  at::DataPtr resized = device_allocator_instance.allocate(num_bytes);
  const size_t kept = std::min(num_bytes, impl->nbytes());
  if (kept) copy_on_device(resized.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(resized));
  impl->set_nbytes(num_bytes);
}

// Torch's own `resize_` can grow the storages of PrivateUse1, through its hooks, but none of
// CUDA's: those it must find large enough.
void resize(const at::Tensor& tensor, c10::IntArrayRef size,
            std::optional<c10::MemoryFormat> format) {
  if (face().is_cuda) {
    const auto numel = static_cast<size_t>(c10::multiply_integers(size));
    const size_t num_bytes =
        (static_cast<size_t>(tensor.storage_offset()) + numel) * tensor.itemsize();
    if (numel && num_bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), num_bytes);
  }
  at::native::resize_(tensor, size, format);
}

// Autograd counts the devices at a process' first backward pass, and starts a thread for each.
// Where that found none, because this one came later, it has to count again, or every backward pass
// here ends in an assertion. Its members are protected (torch 2.11 and 2.13, engine.h).
struct AutogradEngine : torch::autograd::Engine {
  static void count_devices_again() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    const bool has_started = engine.*(&AutogradEngine::thread_pool_shared_) != nullptr;
    const bool is_without = (engine.*(&AutogradEngine::device_ready_queues_)).empty();
    if (has_started && is_without) (engine.*(&AutogradEngine::start_device_threads))();
  }
};

void register_device() {
  constexpr uint8_t kAboveTorchsOwn = 100;
  c10::SetAllocator(face().device, &device_allocator_instance, kAboveTorchsOwn);
  at::setHostAllocator(face().device, &pinned_allocator_instance, kAboveTorchsOwn);
  static const c10::impl::DeviceGuardImplRegistrar guard(face().device, new TorchGuard);
  if (face().is_cuda) {
    install_cuda_hooks();
    install_cuda_timer();
  } else {
    install_sim_hooks();
  }
  AutogradEngine::count_devices_again();
}

}  // namespace sim
