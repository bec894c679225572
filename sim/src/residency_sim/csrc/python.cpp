// The Python side of the extension: settings, figures, the line of Python that issues an operation,
// and the allocator on its own, driven by a recorded trace.
#include <ATen/Context.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <thread>

#include "fork.h"
#include "registration.h"
#include "torch_device.h"
#include "torch_readings.h"
#include "torch_scratch.h"

namespace py = pybind11;

namespace sim {

void register_distributed(py::module& module);  // torch_distributed.cpp
void register_memory(py::module& module);       // python_memory.cpp
void register_snapshots(py::module& module);    // python_snapshot.cpp

namespace {

// ------------------------------------------------------------------- the end of the interpreter

// [Note: threads at exit] Autograd's device thread drops what the last backward left behind, for
// which it takes the interpreter's lock. When the interpreter is ending by then, Python up to 3.13
// ends the thread by unwinding its stack, which C++ forbids inside a destructor: std::terminate,
// and the process aborts though all its work is done. Python 3.14 lets such a thread sleep for good
// instead; so does this.

std::terminate_handler terminate_otherwise = nullptr;
std::thread::id main_thread;

bool is_interpreter_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() || !Py_IsInitialized();
#else
  return _Py_IsFinalizing() || !Py_IsInitialized();
#endif
}

void sleep_if_interpreter_ends() {
  if (std::this_thread::get_id() == main_thread || !is_interpreter_ending()) terminate_otherwise();
  while (true) pause();
}

// Torch's engine would wait for such a thread, by default for ten seconds.
void let_threads_outlive_interpreter() {
  setenv("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0.1", /*overwrite=*/0);
  main_thread = std::this_thread::get_id();
  terminate_otherwise = std::set_terminate(&sleep_if_interpreter_ends);
}

// --------------------------------------------------------------- the line that issues an operation

std::string* skipped_folder = nullptr;  // torch's own files: the line of interest is outside them

bool is_of_interest(PyFrameObject* frame, std::string& line) {
  PyCodeObject* code = PyFrame_GetCode(frame);
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  const bool found =
      file && std::string_view(file).rfind(*skipped_folder, 0) != 0 && file[0] != '<';
  if (found) line = std::string(file) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
  Py_DECREF(code);
  return found;
}

std::string line_of_python() {
  if (!Py_IsInitialized()) return "the interpreter has ended";
  py::gil_scoped_acquire gil;
  std::string line = "a thread of torch, such as autograd's";
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame && !is_of_interest(frame, line)) {
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return line;
}

PyObject* race_error = nullptr;  // residency.sim.RaceError

struct PythonRace final : torch::PyTorchError {
  using torch::PyTorchError::PyTorchError;
  PyObject* python_type() override { return race_error; }
};

void throw_race(const Race& race) { throw PythonRace(race.what()); }

// Taking the interpreter's lock again with the mutex held is safe: its holder never waits for the
// mutex but in here.
void wait_without_interpreter(std::mutex& mutex) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return mutex.lock();
  py::gil_scoped_release release;
  mutex.lock();
}

// ------------------------------------------------------------------------------ the trace's replay

// A device whose segments lie where a recorded run had them. Nothing is ever stored in them.
class TraceReplay final : MemorySource {
 public:
  void adopt_segment(uintptr_t address, size_t num_bytes, bool is_small,
                     const std::vector<std::pair<size_t, size_t>>& blocks) {
    std::vector<CachingAllocator::Layout> layout;
    for (const auto& [size, requested] : blocks) layout.push_back({size, requested});
    allocator_.adopt_segment(at(address), num_bytes, is_small, layout);
  }
  // Returns the address and whether a segment was needed.
  std::pair<uintptr_t, bool> allocate(size_t num_bytes, uintptr_t next_segment) {
    next_segment_ = next_segment;
    grew_ = false;
    Block* block = allocator_.allocate(num_bytes, kDefaultStream);
    return {reinterpret_cast<uintptr_t>(block->address), grew_};
  }
  void free(uintptr_t address) { allocator_.free(allocator_.find(at(address))); }
  std::vector<uintptr_t> empty_cache() {
    released_.clear();
    allocator_.empty_cache();
    return released_;
  }
  size_t peak_reserved_bytes() {
    return static_cast<size_t>(allocator_.stats().reserved_bytes[0].peak);
  }

 private:
  static char* at(uintptr_t address) { return reinterpret_cast<char*>(address); }
  char* reserve(size_t) override {
    grew_ = true;
    // Where the recorded run did not grow, an address that it cannot have used.
    return at(next_segment_ ? next_segment_ : (unexpected_ += uintptr_t(1) << 40));
  }
  void release(char* segment, size_t) override {
    released_.push_back(reinterpret_cast<uintptr_t>(segment));
  }
  void synchronize_memory() override {}
  void finish_pending_frees() override {}
  size_t capacity_bytes() const override { return size_t(1) << 40; }
  char* reserve_addresses(size_t num_bytes) override { return reserve(num_bytes); }
  void release_addresses(char*, size_t) override {}
  bool map(char*, size_t) override { return grew_ = true; }
  void unmap(char* address, size_t) override { release(address, 0); }

  CachingAllocator allocator_{*this};
  uintptr_t next_segment_ = 0;
  uintptr_t unexpected_ = uintptr_t(1) << 52;
  bool grew_ = false;
  std::vector<uintptr_t> released_;
};

// --------------------------------------------------------------------------------------- settings

void configure(size_t capacity_bytes, const std::string& schedule, bool check_races, bool dry,
               std::optional<std::array<double, 6>> rates, const std::string& share_folder,
               const std::string& share_name, bool workspaces, size_t blas_workspace_bytes,
               size_t context_bytes, int64_t capability, int64_t num_multiprocessors,
               int64_t threads_per_multiprocessor) {
  Settings settings;
  settings.capacity_bytes = capacity_bytes;
  settings.context_bytes = context_bytes;
  settings.schedule = schedule == "eager"  ? Schedule::kEager
                      : schedule == "late" ? Schedule::kLate
                                           : Schedule::kOvertake;
  settings.check_races = check_races;
  settings.dry = dry;
  settings.workspaces = workspaces;
  settings.blas_workspace_bytes = blas_workspace_bytes;
  settings.capability = capability;
  settings.num_multiprocessors = num_multiprocessors;
  settings.threads_per_multiprocessor = threads_per_multiprocessor;
  if (rates)
    settings.rates =
        Rates{(*rates)[0], (*rates)[1], (*rates)[2], (*rates)[3], (*rates)[4], (*rates)[5] != 0};
  Machine::get().configure(settings, share_folder, share_name);
}

py::dict pinned_memory_stats() {
  const HostStatistics statistics = Machine::get().pinned_statistics();
  py::dict result;
  result["used_bytes.current"] = statistics.used_bytes.current;
  result["used_bytes.peak"] = statistics.used_bytes.peak;
  result["pinned_bytes.current"] = statistics.allocated_bytes.current;
  result["pinned_bytes.peak"] = statistics.allocated_bytes.peak;
  result["registered_bytes.current"] = statistics.registered_bytes.current;
  result["registered_bytes.peak"] = statistics.registered_bytes.peak;
  result["num_pinned"] = statistics.allocations.allocated;
  return result;
}

void begin_capture(PoolId pool, int mode) {
  Machine::get().begin_capture(pool, static_cast<CaptureMode>(mode));
}

// Held by a graph of Python's.
struct Captured {
  std::shared_ptr<const Graph> graph;
};

int exchange_capture_mode(int mode) {
  return static_cast<int>(Captures::exchange_mode(static_cast<CaptureMode>(mode)));
}

// The table of torch_scratch.h, for its readers: an entry for each operation.
py::list scratch_rules() {
  py::list rules;
  for (const ScratchEntry& entry : scratch_table()) {
    py::dict rule;
    rule["operation"] = entry.operation;
    rule["takes_temporaries"] = entry.charge != nullptr;
    rule["keeps_storage"] = entry.num_kept != nullptr;
    rule["orders_results"] = entry.results == Results::kByRule;
    rule["source"] = entry.source;
    rule["measured"] = entry.measured;
    rule["first_torch"] = "2." + std::to_string(entry.versions.first);
    rule["last_torch"] = "2." + std::to_string(entry.versions.last);
    rules.append(rule);
  }
  return rules;
}

void free_checked(uintptr_t number) {
  auto* address = reinterpret_cast<void*>(number);
  const bool is_ours = !address || Machine::get().with_allocator([&](CachingAllocator& allocator) {
    return allocator.find(address) != nullptr;
  });
  TORCH_CHECK(is_ours, "invalid device pointer: ", address);
  Machine::get().free(address);
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace sim;
  module.def("choose_face", &choose_face);
  module.def("register", [](const std::string& torch_folder, py::object race_error_class) {
    skipped_folder = new std::string(torch_folder);
    race_error = race_error_class.release().ptr();
    Machine::get().set_python({&line_of_python, &throw_race, &wait_without_interpreter});
    let_threads_outlive_interpreter();
    register_kernels();
    register_device();
  });
  py::register_exception<ShareRefused>(module, "ShareRefused", PyExc_ValueError);
  py::register_exception<ShareUnusable>(module, "ShareUnusable", PyExc_OSError);
  module.def("allocate", [](size_t num_bytes) {  // on the current stream
    return reinterpret_cast<uintptr_t>(Machine::get().allocate(num_bytes));
  });
  module.def("free", torch::wrap_pybind_function(&free_checked));
  module.def("resize_storage", [](const c10::Storage& storage, size_t num_bytes) {
    resize_storage(storage, num_bytes);
  });
  // Of the events' handles: torch's own compares no subclasses of its event.
  module.def("elapsed_milliseconds", [](uintptr_t first, uintptr_t second) {
    return c10::impl::VirtualGuardImpl(face().device)
        .elapsedTime(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second), 0);
  });
  module.def("configure", &configure, py::call_guard<py::gil_scoped_release>());
  module.def("is_in_bad_fork", &is_in_bad_fork);
  module.def("recover", [] { Machine::get().recover(); });
  module.def("use_device", torch::wrap_pybind_function(&use_device));
  module.def("poison_fork", &poison_fork);
  module.def("initialize", torch::wrap_pybind_function(
                               [] { at::globalContext().lazyInitDevice(face().device); }));
  module.def("set_num_devices", &set_num_devices);
  module.def("num_devices", &num_devices);
  module.def("has_context", &has_context);
  module.def("machine_index", &machine_index);
  module.def("exchange_device", torch::wrap_pybind_function(&exchange_device));
  module.def("maybe_exchange_device", torch::wrap_pybind_function(&maybe_exchange_device));
  module.def("capacity_bytes", [] { return Machine::get().settings().capacity_bytes; });
  py::class_<Captured>(module, "Captured");
  module.def("is_capturing", [] { return Machine::get().is_capturing(); });
  module.def("begin_capture", torch::wrap_pybind_function(&begin_capture));
  module.def("end_capture", torch::wrap_pybind_function([](PoolId pool) {
               return Captured{Machine::get().end_capture(pool)};
             }));
  module.def("replay", torch::wrap_pybind_function_no_gil([](const Captured& captured) {
               Machine::get().replay(captured.graph);
             }));
  module.def("exchange_capture_mode", &exchange_capture_mode);
  module.def("attach_guess_observer", &attach_guess_observer);
  module.def("attach_decider", &attach_decider);
  module.def("now_seconds", [] { return Machine::get().now_seconds(); });
  module.def("scratch_rules", &scratch_rules);
  module.def("default_generator", [] { return default_generator(); });
  module.def("pinned_memory_stats", &pinned_memory_stats);
  module.def("reset_peak_pinned_memory_stats",
             [] { Machine::get().reset_peak_pinned_statistics(); });

  register_distributed(module);
  register_memory(module);
  register_snapshots(module);

  py::class_<TraceReplay>(module, "TraceReplay")
      .def(py::init<>())
      .def("adopt_segment", &TraceReplay::adopt_segment)
      .def("allocate", &TraceReplay::allocate)
      .def("free", &TraceReplay::free)
      .def("empty_cache", &TraceReplay::empty_cache)
      .def("peak_reserved_bytes", &TraceReplay::peak_reserved_bytes);
}
