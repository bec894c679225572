// What a user can set about the simulated accelerator. One instance per process, see machine.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace sim {

// When queued device work runs. Each is a legal execution of the same program; a program whose
// waits are complete computes the same bytes under all three.
enum class Schedule {
  kEager,  // at once
  kLate,   // when something forces it: the forced stream and its legal predecessors, nothing else
  kOvertake,  // when something forces it: first everything else that legally may run
};

// Per second; a rate of 0 means that such work takes no time.
struct Rates {
  double h2d_bytes = 0;
  double d2h_bytes = 0;
  double duplex_bytes = 0;    // of both links together while both are busy; 0 for their sum
  double memory_bytes = 0;    // of device memory, read or written by kernels
  double operations = 0;      // of kernels
  bool serves_ready = false;  // whether a link serves what is ready, and not in order of issue
};

struct Settings {
  size_t capacity_bytes = size_t(8) << 30;
  size_t context_bytes = 0;  // of the capacity, once the process has a context
  Schedule schedule = Schedule::kLate;
  bool check_races = false;
  std::optional<Rates> rates;  // simulated time; without them events carry the host's time
  bool workspaces = true;      // charge the scratch memory of CUDA's libraries and kernels
  size_t blas_workspace_bytes = 0;
  int64_t capability = 0;  // of the device whose kernels' scratch is charged: 89 for 8.9
  int64_t num_multiprocessors = 0;
  int64_t threads_per_multiprocessor = 0;
  bool dry = false;  // kernels run on meta tensors, and no byte of device memory is ever touched
};

}  // namespace sim
