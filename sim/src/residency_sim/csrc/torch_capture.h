// What a capture into a graph keeps of an operation, and its replay.
#pragma once

#include <functional>

#include "torch_dry.h"
#include "torch_plan.h"

namespace sim {

// A copy of a tensor of the host, for work that comes later: a launch reads it, as on CUDA.
at::Tensor copy_as_read_now(const at::Tensor& tensor);

// Refuses, in CUDA's words, an operation whose results have sizes that the host must know: its
// kernel waits for the device.
void check_capturable(const std::string& name, const Arguments& arguments);

struct CapturedCall {
  const Plan& plan;
  Arguments arguments;  // of the device, as they are after the call
  std::vector<c10::IValue> results;
  std::function<void(const Arguments&, torch::jit::Stack*)> run;  // a CPU kernel on aliases
};

// Adds an operation that has been run for its shapes to the capture that is under way: a replay
// reads and writes the bytes that the tensors have now, even where others have them then.
void capture_call(Launch&& launch, CapturedCall call);

}  // namespace sim
