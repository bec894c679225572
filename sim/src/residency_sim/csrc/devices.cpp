#include "devices.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "face.h"
#include "machine.h"

namespace sim {
namespace {

constexpr int kNone = -1;

std::atomic<int> number_of_devices = 1;
std::atomic<int> index_of_machine = 0;
std::atomic<uint32_t> contexts = 0;  // one bit a device

thread_local int t_current = 0;     // as cudaGetDevice has it
thread_local int t_target = kNone;  // the one that torch has noted instead

void cuda_set_device(int index) {
  check_device_index(index);
  Machine::get().use_context_on(index);
  t_current = index;
}

}  // namespace

int num_devices() { return number_of_devices; }

void set_num_devices(int number) {
  number_of_devices = number;
  index_of_machine = number == 1 ? 0 : kNone;
}

void check_device_index(int index) {
  if (index < number_of_devices) return;
  constexpr int kInvalidDevice = 101;  // cudaErrorInvalidDevice
  const std::string found =
      "; found " + std::string(face().name) + ":" + std::to_string(index) + "\n";
  const std::string there =
      number_of_devices == 1
          ? "there is one simulated accelerator, " + std::string(face().device_label)
          : "there are " + std::to_string(number_of_devices) + " simulated accelerators";
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kInvalidDevice,
                              std::string(face().is_cuda ? "CUDA" : "sim") +
                                  " error: invalid device ordinal\n" + there + found);
}

int machine_index() { return index_of_machine; }

void place_machine(int index) {
  check_device_index(index);
  int found = index_of_machine;
  if (found == index) return;
  if (found == kNone && index_of_machine.compare_exchange_strong(found, index)) return;
  TORCH_CHECK(false, "one device of a process has memory and streams in the simulator, ",
              face().name, ":", found,
              " here, on which the first tensor or stream was made; found ", face().name, ":",
              index, ", on which it models a context alone");
}

int current_device() { return t_target == kNone ? t_current : t_target; }

void set_device(int index) {
  check_device_index(index);
  t_target = kNone;
  if (index != t_current) cuda_set_device(index);
}

int exchange_device(int index) {
  const int before = current_device();
  const bool is_noted = std::exchange(t_target, kNone) != kNone;
  if (is_noted || index != t_current) cuda_set_device(index);
  return before;
}

void maybe_set_device(int index) {
  if (has_context(index)) return set_device(index);
  t_target = index;
}

int maybe_exchange_device(int index) {
  const int before = current_device();
  check_device_index(index);
  if (index == t_current) {
    t_target = kNone;
  } else {
    maybe_set_device(index);
  }
  return before;
}

bool has_context(int index) { return contexts >> index & 1; }
bool has_any_context() { return contexts != 0; }
void note_context(int index) { contexts |= uint32_t(1) << index; }

}  // namespace sim
