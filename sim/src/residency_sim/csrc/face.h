// As which device of torch the machine is registered: as `sim`, torch's PrivateUse1 device, or as
// `cuda` (the faces of the simulator). A process has one, chosen before anything asks for it. All
// that differs between the two by name is in here.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>

#include <string>

namespace sim {

struct Face {
  const char* name;
  bool is_cuda;
  c10::DeviceType device;
  c10::DispatchKey key;
  c10::DispatchKey autograd_key;
  const char* runtime;
  const char* device_label;
  const char* backend;
  const char* out_of_memory;  // as `cuda` the words of torch's own error: frameworks look for them
  const char* owner_of_memory;  // and its index
};

const Face& face();
void choose_face(const std::string& name);

}  // namespace sim
