// The Python side of what the allocator shows and remembers: its segments, its history with the
// stacks, and who hears of allocations that fail. Names are those of torch's snapshots.
//
// Source of the names and rules: torch/csrc/cuda/Module.cpp and memory_snapshot.cpp.
#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/AllocatorConfig.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch_device.h"

namespace py = pybind11;

namespace torch {
// Of torch/csrc/profiler/python/combined_traceback.h, which includes a library that torch does not
// come with.
std::vector<py::object> py_symbolize(std::vector<CapturedTraceback*>& to_symbolize);
}  // namespace torch

namespace sim {
namespace {

using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;

// --------------------------------------------------------------------------------------- snapshots

// All stacks come from `gather_python` and `gather_all`.
torch::CapturedTraceback* traceback_of(const Stack& stack) {
  return static_cast<torch::CapturedTraceback*>(stack.get());
}

// The frames of many stacks, made together: most stacks are those of many events.
class Frames {
 public:
  void of(const Stack& stack, const py::dict& shown) {
    stacks_.push_back(traceback_of(stack));
    shown_.push_back(shown);
  }
  void of_block(const Stack& stack, const py::dict& shown) {
    stack ? of(stack, shown) : void(shown["frames"] = py::list());
  }
  void make() {
    const std::vector<py::object> frames = torch::py_symbolize(stacks_);
    for (size_t i = 0; i < frames.size(); i++) shown_[i]["frames"] = frames[i];
  }

 private:
  std::vector<torch::CapturedTraceback*> stacks_;
  std::vector<py::dict> shown_;
};

py::dict as_dict(const CachingAllocator::Segment& segment, Frames& frames) {
  size_t total = 0, allocated = 0, active = 0, requested = 0;
  py::list blocks;
  for (const Block& block : segment.blocks) {
    const char* state = block.is_allocated ? "active_allocated"
                        : block.is_free()  ? "inactive"
                                           : "active_pending_free";
    total += block.size;
    if (block.is_allocated) allocated += block.size;
    if (!block.is_free()) active += block.size, requested += block.requested;
    py::dict shown;
    shown["address"] = reinterpret_cast<uintptr_t>(block.address);
    shown["size"] = block.size;
    shown["requested_size"] = block.requested;
    shown["state"] = state;
    frames.of_block(block.stack, shown);
    blocks.append(shown);
  }
  const Block& first = segment.blocks.front();
  py::dict shown;
  shown["device"] = sim::device().index();
  shown["address"] = reinterpret_cast<uintptr_t>(first.address);
  shown["total_size"] = total;
  shown["allocated_size"] = allocated;
  shown["active_size"] = active;
  shown["requested_size"] = requested;
  shown["stream"] = first.stream;
  shown["segment_type"] = segment.is_small ? "small" : "large";
  shown["segment_pool_id"] = segment.pool;
  shown["is_expandable"] = first.expandable != nullptr;
  frames.of_block(first.segment_stack, shown);
  shown["blocks"] = blocks;
  return shown;
}

py::dict as_dict(const History::Entry& entry, Frames& frames) {
  py::dict shown;
  if (entry.stack) frames.of(entry.stack, shown);
  shown["action"] = name_of(entry.action);
  shown[entry.action == Action::kOutOfMemory ? "device_free" : "addr"] = entry.address;
  shown["size"] = entry.size;
  shown["stream"] = entry.stream;
  shown["pool_id"] = entry.pool;
  shown["time_us"] = entry.time_us;
  shown["compile_context"] = "N/A";
  shown["user_metadata"] = entry.metadata;
  return shown;
}

py::dict as_dict(const History::Annotation& annotation) {
  py::dict shown;
  shown["name"] = annotation.name;
  shown["stage"] = annotation.begins ? "START" : "END";
  shown["device"] = sim::device().index();
  shown["time_us"] = annotation.time_us;
  return shown;
}

// Those that only CUDA has mean nothing here; they are in the text alone.
py::dict allocator_settings() {
  py::dict roundings;
  size_t power = 1;
  for (const size_t divisions : Config::roundup_power2_divisions()) {
    roundings[py::str(std::to_string(power))] = divisions;
    power *= 2;
  }
  py::dict shown;
  shown["PYTORCH_CUDA_ALLOC_CONF"] = Config::last_allocator_settings();
  shown["max_split_size"] = static_cast<int64_t>(Config::max_split_size());
  shown["garbage_collection_threshold"] = Config::garbage_collection_threshold();
  shown["expandable_segments"] = Config::use_expandable_segments();
  shown["roundup_power2_divisions"] = roundings;
  return shown;
}

// Of all pools or of one; segments, events, annotations and settings.
py::dict snapshot(PoolId only, bool with_entries) {
  Machine::Snapshot found;
  {
    py::gil_scoped_release no_gil;
    found = Machine::get().snapshot(only, with_entries);
  }
  Frames frames;
  py::list segments, entries, annotations;
  for (const auto& segment : found.segments) segments.append(as_dict(segment, frames));
  for (const auto& entry : found.entries) entries.append(as_dict(entry, frames));
  for (const auto& annotation : found.annotations) annotations.append(as_dict(annotation));
  frames.make();
  py::list traces;  // one of each device
  for (int i = 0; i < num_devices(); ++i) {
    traces.append(i == sim::device().index() ? entries : py::list());
  }
  py::dict shown;
  shown["segments"] = segments;
  shown["device_traces"] = traces;
  shown["allocator_settings"] = allocator_settings();
  shown["external_annotations"] = annotations;
  return shown;
}

py::object stack_of_allocation(uintptr_t address) {
  const Stack stack = Machine::get().with_allocator([&](CachingAllocator& allocator) {
    const Block* block = allocator.find(reinterpret_cast<const void*>(address));
    return block ? block->stack : Stack();
  });
  if (!stack) return py::none();
  std::vector stacks{traceback_of(stack)};
  return torch::py_symbolize(stacks).front();
}

// ----------------------------------------------------------------------------------------- history

Stack gather_python() { return torch::CapturedTraceback::gather(true, true, false); }
Stack gather_all() { return torch::CapturedTraceback::gather(true, true, true); }

void annotate(const at::RecordFunction& range, bool begins) {
  Machine::get().with_allocator(
      [&](CachingAllocator& allocator) { allocator.history().annotate(range.name(), begins); });
}

// Ranges of `record_function` become annotations while a history is recorded: those of this thread,
// or of all.
void watch_ranges(bool is_on, bool of_all_threads) {
  static at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  if (is_on == (handle != at::INVALID_CALLBACK_HANDLE)) return;
  if (!is_on) {
    at::removeCallback(std::exchange(handle, at::INVALID_CALLBACK_HANDLE));
    return;
  }
  at::RecordFunctionCallback callback(
      [](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
        annotate(range, true);
        return nullptr;
      },
      [](const at::RecordFunction& range, at::ObserverContext*) { annotate(range, false); });
  callback.scopes({at::RecordScope::USER_SCOPE});
  handle = of_all_threads ? at::addGlobalCallback(callback) : at::addThreadLocalCallback(callback);
}

StacksOf stacks_of(const std::optional<std::string>& context) {
  if (!context) return StacksOf::kNothing;
  if (*context == "state") return StacksOf::kBlocks;
  if (*context == "alloc") return StacksOf::kAllocations;
  TORCH_CHECK(*context == "all", "expected context to be 'state', 'alloc', 'all', or None");
  return StacksOf::kFrees;
}

// torch's `_record_memory_history`; what it says of compiled regions is left out, as nothing is
// compiled.
void record_history(const std::optional<std::string>& enabled,
                    const std::optional<std::string>& context, const std::string& stacks,
                    size_t max_entries, bool clear, bool, bool annotates_all_threads,
                    const std::vector<std::string>& skipped) {
  TORCH_CHECK(!enabled || *enabled == "state" || *enabled == "all",
              "expected state to be 'state', 'all', or None");
  TORCH_CHECK(stacks == "python" || stacks == "all", "expected stacks to be 'python', or 'all'");
  History::Settings settings{enabled.has_value(), stacks_of(context),
                             stacks == "all" ? &gather_all : &gather_python,
                             enabled == "all" ? max_entries : 1};
  for (const std::string& name : skipped) settings.skipped.insert(action_named(name));
  at::globalContext().lazyInitDevice(face().device);
  watch_ranges(settings.is_on, annotates_all_threads);
  py::gil_scoped_release no_gil;
  Machine::get().with_allocator(
      [&](CachingAllocator& allocator) { allocator.history().set(std::move(settings), clear); });
}

using PythonObserver = std::function<void(int64_t, int64_t, int64_t, int64_t)>;

void attach_observer(PythonObserver observer) {
  Machine::get().attach_observer(
      [observer = std::move(observer)](size_t asked, size_t allowed, size_t free) {
        observer(sim::device().index(), static_cast<int64_t>(asked), static_cast<int64_t>(allowed),
                 static_cast<int64_t>(free));
      });
}

}  // namespace

void register_snapshots(py::module& module) {
  module.def("snapshot", torch::wrap_pybind_function(&snapshot), py::arg("only") = PoolId{0, 0},
             py::arg("with_entries") = true);
  module.def("stack_of_allocation", torch::wrap_pybind_function(&stack_of_allocation));
  module.def("record_history", torch::wrap_pybind_function(&record_history), py::arg("enabled"),
             py::arg("context"), py::arg("stacks"), py::arg("max_entries"),
             py::arg("clear") = false, py::arg("compile_context") = false,
             py::arg("annotates_all_threads") = false,
             py::arg("skipped") = std::vector<std::string>());
  module.def("attach_observer", &attach_observer);
  module.def("set_memory_metadata",
             [](std::string text) { History::metadata() = std::move(text); });
  module.def("memory_metadata", [] { return History::metadata(); });
}

}  // namespace sim
