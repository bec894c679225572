// What attention's kernels (torch_attention.cpp) and its choice ask of its scratch.
#pragma once

namespace sim {

// Whether a program wants the same bits each time, and no warning alone.
bool is_deterministic();

}  // namespace sim
