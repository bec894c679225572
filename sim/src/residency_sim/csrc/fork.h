// Whether this process may use the device. A child forked after its parent used the device has the
// parent's bytes but not its streams, locks or share of the capacity; as on CUDA it is refused, and
// as on CUDA a child of a process that only registered the device is not.
#pragma once

namespace sim {

bool is_in_bad_fork();

// From here on a child may not use the device. As on CUDA, to count the devices is enough, which
// starts its driver, where a context is not (THCPModule_getDeviceCount_wrap in torch's
// torch/csrc/cuda/Module.cpp).
void poison_fork();

// Called by whatever uses the device; throws in a child that may not. What the child frees of its
// parent's is left alone: the parent may have been forked with a lock taken.
void use_device();

}  // namespace sim
