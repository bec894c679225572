// What dry mode knows of an operation beyond torch's meta kernels: operations that have none,
// results whose sizes are those of their values, storages that real kernels keep larger than their
// result, and the few values that torch's own code branches on.
#pragma once

#include <functional>
#include <string>

#include "torch_device.h"

namespace sim {

// Most operations take fewer: no allocation.
using Arguments = c10::SmallVector<c10::IValue, 8>;

struct DryCall {
  const std::string& name;
  const c10::FunctionSchema& schema;
  const Arguments& arguments;  // of the device
  Arguments& aliased;          // the same as meta tensors
  torch::jit::Stack& results;  // filled with meta tensors
  std::function<void(c10::DispatchKey, const Arguments&, torch::jit::Stack&)> call;

  void call_meta() const { call(c10::DispatchKey::Meta, aliased, results); }
};

// Runs an operation for its shapes; on an exception it has changed nothing.
void run_dry(const DryCall& call);

// [Note: readings] No kernel computes a value in dry mode, so `item()` gives a placeholder: 1 for
// numbers, False for truth values. Torch's own code asks too, and must take the branch that a
// training step takes: nothing overflowed, nothing is zero, every check holds. A storage that such
// an answer was written to is noted, until something else is written there. `kHolds` is of a number
// that was compared with 0 and is more: true where torch checks it, and no value that `item()`
// gives.
enum class Reading { kUnknown, kZero, kTrue, kHolds };
Reading dry_reading(const at::Tensor& tensor);

// What the tensors that an operation wrote or made read as.
Reading reading_after(const std::string& name, const Arguments& arguments);
void note_reading(const c10::Storage& storage, Reading reading);

}  // namespace sim
