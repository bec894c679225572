// The Python side of memory: allocator settings, the memory fraction, private pools and library
// workspaces. Its snapshots are in python_snapshot.cpp.
#include <c10/core/AllocatorConfig.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstring>
#include <string_view>
#include <thread>
#include <vector>

#include "allocator_settings.h"
#include "machine.h"
#include "plenty.h"
#include "workspaces.h"

namespace py = pybind11;

namespace sim {
namespace {

template <class Use>
auto with_allocator(Use use) {
  py::gil_scoped_release no_gil;  // the holder of the machine's lock may want the interpreter's
  return Machine::get().with_allocator(use);
}

void begin_allocating_on_this_thread_to(PoolId id) {
  const auto thread = std::this_thread::get_id();
  with_allocator([&](CachingAllocator& allocator) {
    allocator.begin_allocating_to(
        id, [thread](StreamId) { return std::this_thread::get_id() == thread; });
  });
}

py::dict figures_of(const c10::CachingAllocator::Stat& stat) {
  py::dict figures;
  figures["current"] = stat.current;
  figures["peak"] = stat.peak;
  figures["allocated"] = stat.allocated;
  figures["freed"] = stat.freed;
  return figures;
}

py::dict figures_of(const c10::CachingAllocator::DurationStat& stat) {
  py::dict figures;
  figures["total"] = stat.total;
  figures["max"] = stat.max;
  figures["min"] = stat.min;
  figures["count"] = stat.count;
  figures["avg"] = stat.count ? stat.total / stat.count : 0;
  return figures;
}

// What torch reports of CUDA's pinned memory.
py::dict host_memory_stats() {
  const HostStatistics stats = Machine::get().pinned_statistics();
  py::dict result;
  result["allocations"] = figures_of(stats.allocations);
  result["allocated_bytes"] = figures_of(stats.allocated_bytes);
  result["active_requests"] = figures_of(stats.active_requests);
  result["active_bytes"] = figures_of(stats.active_bytes);
  result["num_host_alloc"] = stats.allocations.allocated;
  result["num_host_free"] = stats.allocations.freed;
  result["host_alloc_time"] = figures_of(stats.alloc_time);
  result["host_free_time"] = figures_of(stats.free_time);
  return result;
}

// {"all" | "small_pool" | "large_pool": {figure: bytes}}, as torch reports for CUDA.
py::dict figures_of_pool(const c10::CachingAllocator::StatArray& stats) {
  py::dict result;
  const char* names[] = {"all", "small_pool", "large_pool"};
  for (size_t i = 0; i < stats.size(); i++) result[names[i]] = figures_of(stats[i]);
  return result;
}

py::dict private_pool_stats() {
  const auto stats =
      with_allocator([](CachingAllocator& allocator) { return allocator.pool_figures(); });
  py::dict result;
  for (const auto& [id, of_a_pool] : stats) {
    result[py::make_tuple(id.first, id.second)] = figures_of_pool(of_a_pool);
  }
  return result;
}

// Five numbers for each entry, in their order in `Journal::Entry`.
py::bytes take_journal() {
  const auto entries =
      with_allocator([](CachingAllocator& allocator) { return allocator.journal().take(); });
  return py::bytes(reinterpret_cast<const char*>(entries.data()),
                   entries.size() * sizeof(Journal::Entry));
}

// The most that was held and reserved, which workspace was taken then, its bytes, and how many
// plans were tried.
std::array<int64_t, 5> peaks_of(const Plenty& plenty) {
  const Plenty::Peaks peaks = plenty.peaks();
  return {peaks.allocated, peaks.reserved, static_cast<int64_t>(peaks.note), peaks.num_bytes,
          peaks.num_trials};
}

void read_journal(Plenty& plenty, const py::bytes& journal) {
  const std::string_view bytes = journal;
  std::vector<Journal::Entry> entries(bytes.size() / sizeof(Journal::Entry));
  std::memcpy(entries.data(), bytes.data(), entries.size() * sizeof(Journal::Entry));
  plenty.read(entries.data(), entries.size());
}

}  // namespace

void register_memory(py::module& module) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  module.def("adopt_allocator_settings", &adopt_allocator_settings, no_gil());
  module.def("set_allocator_settings", &set_allocator_settings, no_gil());
  module.def("set_memory_fraction", [](double fraction) {
    with_allocator([&](CachingAllocator& allocator) { allocator.set_memory_fraction(fraction); });
  });
  module.def("memory_fraction", [] {
    return with_allocator([](CachingAllocator& allocator) { return allocator.memory_fraction(); });
  });
  module.def("add_pool_user", [](PoolId id) {
    with_allocator([&](CachingAllocator& allocator) { allocator.add_pool_user(id); });
  });
  module.def("remove_pool_user", [](PoolId id) {
    with_allocator([&](CachingAllocator& allocator) { allocator.remove_pool_user(id); });
  });
  module.def("num_pool_users", [](PoolId id) {
    return with_allocator(
        [&](CachingAllocator& allocator) { return allocator.num_pool_users(id); });
  });
  module.def("begin_allocating_to", &begin_allocating_on_this_thread_to);
  module.def("end_allocating_to", [](PoolId id) {
    with_allocator([&](CachingAllocator& allocator) { allocator.end_allocating_to(id); });
  });
  module.def("empty_pool_cache", [](PoolId id) { Machine::get().empty_cache(id); }, no_gil());
  module.def("private_pool_stats", &private_pool_stats);
  module.def("keep_journal", [](bool is_on) {
    with_allocator([&](CachingAllocator& allocator) { allocator.journal().set_on(is_on); });
  });
  module.def("take_journal", &take_journal);
  py::class_<Plenty>(module, "Plenty")
      .def(py::init<bool>())
      .def("read", &read_journal)
      .def("peaks", &peaks_of);
  module.attr("names_private_pools") = names_private_pools<DeviceStats>();  // this torch, on CUDA
  module.def("empty_pinned_cache", [] { Machine::get().empty_pinned_cache(); }, no_gil());
  module.def("register_host", [](uintptr_t address, size_t num_bytes) {
    return Machine::get().register_host(reinterpret_cast<void*>(address), num_bytes);
  });
  module.def("unregister_host", [](uintptr_t address) {
    return Machine::get().unregister_host(reinterpret_cast<void*>(address));
  });
  module.def("host_memory_stats", &host_memory_stats);
  module.def("reset_accumulated_host_memory_stats",
             [] { Machine::get().reset_accumulated_pinned_statistics(); });
  module.def("sort_scratch_bytes", &sort_scratch_bytes);
  module.def("scan_scratch_bytes", &scan_scratch_bytes);
  module.def("scan_by_key_scratch_bytes", &scan_by_key_scratch_bytes);
  module.def("select_scratch_bytes", &select_scratch_bytes);
  module.def("unique_by_key_scratch_bytes", &unique_by_key_scratch_bytes);
  module.def("sum_scratch_bytes", &sum_scratch_bytes);
  module.def("blas_workspace_bytes", [](std::optional<std::string> config, int capability_major) {
    bool is_understood = true;
    const size_t num_bytes =
        blas_workspace_bytes(config ? config->c_str() : nullptr, capability_major, is_understood);
    return std::make_pair(num_bytes, is_understood);
  });
  module.def("blas_workspaces", [] {
    std::vector<uintptr_t> addresses;
    for (void* each : blas_workspaces()) addresses.push_back(reinterpret_cast<uintptr_t>(each));
    return addresses;
  });
  module.def("clear_workspaces", &clear_blas_workspaces, no_gil());
}

}  // namespace sim
