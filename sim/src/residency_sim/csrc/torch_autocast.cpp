// Autocast of the face `sim`, with torch's own lists of operations. For CUDA torch registers them
// itself, and nothing asks for these.
#include <ATen/autocast_mode.h>

#include "registration.h"

RESIDENCY_KERNELS(_, c10::DispatchKey::AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

RESIDENCY_KERNELS(aten, c10::DispatchKey::AutocastPrivateUse1, m) {
  using namespace at;  // the macros below name things in both
  using namespace at::autocast;
#define RESIDENCY_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(RESIDENCY_LOWER)
#define RESIDENCY_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(RESIDENCY_FP32)
#define RESIDENCY_FP32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(RESIDENCY_FP32_RESULT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define RESIDENCY_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(RESIDENCY_PROMOTE)
}
