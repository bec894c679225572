// What dry mode knows of an operation beyond torch's meta kernels: operations that have none, and
// results whose sizes are those of their values.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "torch_device.h"

namespace sim {

// Most operations take fewer: no allocation.
using Arguments = c10::SmallVector<c10::IValue, 8>;

// An operation as the host computed it, of values that are known. [Note: readings]
struct Computed {
  Arguments arguments;
  std::vector<size_t> written;  // of the arguments
  torch::jit::Stack results;
};

struct DryCall {
  const std::string& name;
  const c10::FunctionSchema& schema;
  const Arguments& arguments;  // of the device
  Arguments& aliased;          // the same as meta tensors
  torch::jit::Stack& results;  // filled with meta tensors
  const Computed* computed;    // or nullptr
  std::function<void(c10::DispatchKey, const Arguments&, torch::jit::Stack&)> call;

  void call_meta() const { call(c10::DispatchKey::Meta, aliased, results); }
};

// Runs an operation for its shapes; on an exception it has changed nothing.
void run_dry(const DryCall& call);

}  // namespace sim
