// What the fallback asks about the scratch memory that an operation's CUDA kernel takes.
#pragma once

#include <ATen/core/function_schema.h>
#include <c10/util/ArrayRef.h>

#include <utility>
#include <vector>

#include "torch_device.h"

namespace sim {

// A call whose results have been allocated, as CUDA allocates them before its scratch.
struct ScratchCall {
  c10::ArrayRef<c10::IValue> arguments;
  c10::ArrayRef<c10::IValue> results;

  // One of the device, or an undefined one.
  at::Tensor argument(size_t index) const;
  at::Tensor result(size_t index) const;
};

struct ScratchRule {
  void (*charge)(const ScratchRule& rule, const ScratchCall& call) = nullptr;
  int dim = -1;  // which argument it is, or -1
  int keepdim = -1;

  bool takes_any() const { return charge != nullptr; }
};

ScratchRule scratch_rule(const c10::FunctionSchema& schema);

// Charges the scratch of a call for as long as CUDA's kernel holds it.
void charge_scratch(const ScratchRule& rule, const ScratchCall& call);

// The bytes of a copy that a kernel makes of what it wants contiguous.
int64_t bytes_to_be_contiguous(const at::Tensor& tensor);

// The rules, by the operation's name without its overload; each in the file of its kind.
using ChargeScratch = decltype(ScratchRule::charge);
using ChargesByName = std::vector<std::pair<const char*, ChargeScratch>>;
ChargesByName scratch_of_indexing();
ChargesByName scratch_of_norms();
ChargesByName scratch_of_sorts();

}  // namespace sim
