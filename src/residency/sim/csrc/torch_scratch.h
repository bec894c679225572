// What the fallback asks about the scratch memory that an operation's CUDA kernel takes.
#pragma once

#include <ATen/core/function_schema.h>

#include "torch_device.h"

namespace sim {

struct ScratchRule {
  enum class Kind { kNone, kProduct, kReduction, kIndexPut } kind = Kind::kNone;
  int dim = -1;  // which argument it is, or -1
  int keepdim = -1;

  bool takes_any() const { return kind != Kind::kNone; }
};

ScratchRule scratch_rule(const c10::FunctionSchema& schema);

// Charges the scratch of a call, as CUDA does, after its results have been allocated.
void charge_scratch(const ScratchRule& rule, const c10::IValue* arguments, size_t num_arguments,
                    const c10::IValue& result);

}  // namespace sim
