// What the fallback (torch_fallback.cpp) reads out of an operation's schema, once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "torch_convolutions.h"
#include "torch_determinism.h"
#include "torch_device.h"
#include "torch_scratch.h"

namespace sim {

struct Plan {
  struct Argument {
    bool writes = false;
    bool is_viewed = false;  // the result aliases it and no byte of it is read
    bool is_generator = false;
  };
  std::string name;
  std::vector<Argument> arguments;
  std::vector<int> returned_argument;  // which argument a result is, or -1
  bool may_wait = false;
  bool is_list_kernel = false;
  bool accepts_host_tensors = false;
  OperationCounter count_operations = nullptr;
  ScratchRule scratch;
  NoteConvolution note_convolution = nullptr;
  const DeterminismRule* determinism = nullptr;
  // The *_overrideable convolutions have no CPU kernel; the operations they stand for have. For a
  // few others torch's kernel is not the one to run, or not alone (torch_substitutes.h).
  enum class Kernel {
    kOwn,
    kConvolution,
    kConvolutionBackward,
    kSubstitute,
  } kernel = Kernel::kOwn;
};

const Plan& plan_of(const c10::OperatorHandle& op);

}  // namespace sim
