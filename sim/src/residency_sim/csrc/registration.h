// Kernels are registered when the device is, and not when this library is loaded: a first `enable`
// that is refused leaves torch's dispatcher as it was.
#pragma once

#include <ATen/core/stack.h>
#include <torch/library.h>

#include "face.h"  // whose keys callers name

namespace sim {

// A static one of these stands for kernels of one namespace (`_` for all) at one dispatch key,
// which is asked for when they are registered: some depend on the face.
struct Kernels {
  using Key = c10::DispatchKey (*)();
  using Fill = void (*)(torch::Library&);
  Kernels(const char* name_space, Key key, Fill fill);
};

// RESIDENCY_KERNELS(aten, face().key, library) { library.impl(...); } as torch's
// TORCH_LIBRARY_IMPL, with an expression for the key.
#define RESIDENCY_KERNELS(name_space, key, library) \
  RESIDENCY_KERNELS_NUMBERED(name_space, key, library, C10_UID)
#define RESIDENCY_KERNELS_NUMBERED(name_space, key, library, number)             \
  static void C10_CONCATENATE(fill_kernels_, number)(torch::Library&);           \
  static const ::sim::Kernels C10_CONCATENATE(kernels_, number)(                 \
      #name_space, [] { return key; }, &C10_CONCATENATE(fill_kernels_, number)); \
  static void C10_CONCATENATE(fill_kernels_, number)(torch::Library & library)

// Runs an operation on the device by torch's kernel for the host, or for its shapes only.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);  // torch_fallback.cpp

// Registers all of them, once a process.
void register_kernels();

// Puts the fallback in the place of every kernel that torch has for the device already: those of a
// torch that was built for CUDA.
void override_kernels();  // torch_fallback.cpp

}  // namespace sim
