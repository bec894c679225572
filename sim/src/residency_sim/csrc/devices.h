// The devices of a process, as CUDA's runtime and torch's guards over it have them: which one is
// current for a thread, and on which the process has a context.
//
// [Note: several devices] Of several, one has memory, streams and work, the machine: that on which
// the process first makes a tensor or a stream. The others are there to be made current, and to get
// a context by mistake; what would make more of one is refused.
//
// Source: c10/cuda/CUDAFunctions.cpp. From CUDA 12 on, cudaSetDevice makes a context, so that torch
// only notes a device that a guard goes back to and that has none (MaybeSetDevice).
#pragma once

namespace sim {

int num_devices();
void set_num_devices(int count);  // up to 32, before anything is used

// Raises CUDA's error for a device that is not there.
void check_device_index(int index);

int machine_index();            // -1 as long as it is open which one it is
void place_machine(int index);  // raises where it is another one

// Of the calling thread, which begins on device 0. `set_device` and `exchange_device` make a
// context on the device, unless it is the thread's already; the other two make none.
int current_device();
void set_device(int index);
int exchange_device(int index);
void maybe_set_device(int index);
int maybe_exchange_device(int index);

bool has_context(int index);
bool has_any_context();
void note_context(int index);

// Makes a device current, and the thread's own again: with `set_device` both times, as what CUDA's
// guard does with events, so that a context comes to be on a thread's own device, too.
class WithDevice {
 public:
  explicit WithDevice(int index) : before_(current_device()) { set_device(index); }
  ~WithDevice() noexcept(false) { set_device(before_); }
  WithDevice(const WithDevice&) = delete;

 private:
  const int before_;
};

}  // namespace sim
