// torch's allocator settings (`PYTORCH_ALLOC_CONF` and its setter), with those that CUDA adds.
#pragma once

#include <string>

namespace sim {

// Makes torch pass the settings that only CUDA knows to this library, and refuse unknown ones;
// then takes over what the environment had set before. Throws c10::ValueError where that means
// nothing. May be called again.
void adopt_allocator_settings();

// As torch's own setter, but on an exception nothing has changed.
void set_allocator_settings(const std::string& settings);

}  // namespace sim
