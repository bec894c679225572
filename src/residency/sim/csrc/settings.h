// What a user can set about the simulated accelerator. One instance per process, see machine.h.
#pragma once

#include <cstddef>

namespace sim {

// When queued device work runs. Each is a legal execution of the same program; a program whose
// waits are complete computes the same bytes under all three.
enum class Schedule {
  kEager,  // at once
  kLate,   // when something forces it: the forced stream and its legal predecessors, nothing else
  kOvertake,  // when something forces it: first everything else that legally may run
};

struct Settings {
  size_t capacity_bytes = size_t(8) << 30;
  Schedule schedule = Schedule::kLate;
  bool check_races = false;
  bool dry = false;  // kernels run on meta tensors, and no byte of device memory is ever touched
};

}  // namespace sim
