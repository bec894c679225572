// What cuDNN takes for a convolution beside its results: copies in its layout, for as long as it
// needs them, and a workspace. A card that has the room gives one, one that has not does without:
// the journal hears of it, and the device is not asked. [Note: workspaces of cuDNN]
#pragma once

#include <string>

#include "torch_device.h"

namespace sim {

using NoteConvolution = void (*)(c10::ArrayRef<c10::IValue> arguments,
                                 c10::ArrayRef<c10::IValue> results);

// Nothing for an operation that is no convolution.
NoteConvolution convolution_note(const std::string& name);

}  // namespace sim
