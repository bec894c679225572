// What CUDA refuses under `torch.use_deterministic_algorithms`, or warns of: operations whose
// kernels there add or write in any order. In CUDA's place they are refused here too, though the
// host's kernels that run in their place would repeat.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace sim {

struct DeterminismRule {
  const char* caller;  // what CUDA's message names
  // Whether this call is one of those; all are where it is missing.
  bool (*applies)(const c10::FunctionSchema& schema, const c10::IValue* arguments) = nullptr;
};

// Returns nullptr for an operation that is deterministic on CUDA, and outside CUDA's place.
const DeterminismRule* determinism_rule(const c10::FunctionSchema& schema);

void check_deterministic(const DeterminismRule& rule, const c10::FunctionSchema& schema,
                         const c10::IValue* arguments);

// Of matrix products: what says that cuBLAS is deterministic is an environment variable.
void check_blas_is_deterministic();

}  // namespace sim
