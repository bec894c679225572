// Whether this process may use the device. A child forked after its parent used the device has the
// parent's bytes but not its streams, locks or share of the capacity; as on CUDA it is refused, and
// as on CUDA a child of a process that only registered the device is not.
#pragma once

namespace sim {

bool is_in_bad_fork();

// Called by whatever uses the device; throws in a child that may not. What the child frees of its
// parent's is left alone: the parent may have been forked with a lock taken.
void use_device();

}  // namespace sim
