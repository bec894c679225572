// Kernels in the place of torch's CPU kernels, where CUDA has one that the CPU lacks or where the
// CPU's is wrong, and what CUDA refuses and the CPU does (torch_substitutes.cpp).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "torch_device.h"

namespace sim {

bool has_substitute(const c10::FunctionSchema& schema);
void call_substitute(const c10::OperatorHandle& op, c10::DispatchKey key,
                     const c10::IValue* arguments, size_t num_arguments, torch::jit::Stack* stack);

// Refuses matrix products that CUDA's libraries cannot do: those of integers, and, in CUDA's place,
// those that must be deterministic where nothing says that cuBLAS is.
void check_product(const c10::FunctionSchema& schema, const c10::IValue* arguments,
                   size_t num_arguments);

// Refuses positions on the device in a tensor of the host, in CUDA's words.
void check_indexed(const std::string& name, const c10::IValue& indexed);

// Refuses optimizers' fused steps over tensors that lie in another order than their parameters, as
// CUDA's kernels do; the CPU's take the elements in the order of the memory.
void check_fused_step(const c10::FunctionSchema& schema, const c10::IValue* arguments);

}  // namespace sim
