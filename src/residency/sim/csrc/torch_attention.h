// Which of CUDA's kernels attention takes, for what is made of attention.
#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

namespace sim {

at::SDPBackend kernel_of_attention(const ::sdp::sdp_params& asked);

}  // namespace sim
