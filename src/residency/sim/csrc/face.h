// As which device of torch the machine is registered, decided when the library is compiled: as
// `sim`, torch's PrivateUse1 device, or with RESIDENCY_SIM_CUDA as `cuda` (the faces of the
// simulator). All that differs between the two by name is in here.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>

namespace sim {

#if defined(RESIDENCY_SIM_CUDA)
#define RESIDENCY_SIM_KEY CUDA
#define RESIDENCY_SIM_AUTOGRAD_KEY AutogradCUDA
constexpr bool kIsCuda = true;
constexpr const char* kFace = "cuda";
constexpr const char* kRuntime = "CUDA";
constexpr const char* kDeviceLabel = "cuda:0";
constexpr const char* kBackend = "nccl";
// The words of torch's own error, which frameworks look for.
constexpr const char* kOutOfMemory = "CUDA out of memory";
constexpr const char* kOwnerOfMemory = "GPU ";  // and its index
#else
#define RESIDENCY_SIM_KEY PrivateUse1
#define RESIDENCY_SIM_AUTOGRAD_KEY AutogradPrivateUse1
constexpr bool kIsCuda = false;
constexpr const char* kFace = "sim";
constexpr const char* kRuntime = "the simulated accelerator";
constexpr const char* kDeviceLabel = "sim:0";
constexpr const char* kBackend = "simccl";
constexpr const char* kOutOfMemory = "sim out of memory";
constexpr const char* kOwnerOfMemory = "sim:";
#endif

constexpr c10::DeviceType kSimDevice = c10::DeviceType::RESIDENCY_SIM_KEY;
constexpr c10::DispatchKey kSimKey = c10::DispatchKey::RESIDENCY_SIM_KEY;

}  // namespace sim
