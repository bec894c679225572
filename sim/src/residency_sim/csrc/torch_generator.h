// The device's generators (torch_generator.cpp).
#pragma once

#include <ATen/core/Generator.h>

#include "torch_device.h"

namespace sim {

// Where an operation's random numbers come from.
struct Draw {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

at::Generator new_generator();

// Takes what an operation over `numel` elements draws from one of the device's generators, and
// refuses a generator of another device.
Draw reserve(const at::Generator& generator, int64_t numel);
// The same for a kernel that says itself how far it moves the offset, which goes in fours.
Draw reserve_steps(const at::Generator& generator, int64_t num_steps);

// A generator for a CPU kernel, which it alone has.
at::Generator numbers_at(Draw draw);

}  // namespace sim
