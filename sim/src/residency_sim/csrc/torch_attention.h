// The choice among CUDA's kernels of attention, for the operations that contain attention.
#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

namespace sim {

at::SDPBackend kernel_of_attention(const ::sdp::sdp_params& asked);

}  // namespace sim
