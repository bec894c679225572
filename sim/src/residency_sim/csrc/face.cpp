#include "face.h"

#include <c10/util/Exception.h>

namespace sim {
namespace {

constexpr Face kSim{
    .name = "sim",
    .is_cuda = false,
    .device = c10::DeviceType::PrivateUse1,
    .key = c10::DispatchKey::PrivateUse1,
    .autograd_key = c10::DispatchKey::AutogradPrivateUse1,
    .runtime = "the simulated accelerator",
    .device_label = "sim:0",
    .backend = "simccl",
    .out_of_memory = "sim out of memory",
    .owner_of_memory = "sim:",
};

constexpr Face kCuda{
    .name = "cuda",
    .is_cuda = true,
    .device = c10::DeviceType::CUDA,
    .key = c10::DispatchKey::CUDA,
    .autograd_key = c10::DispatchKey::AutogradCUDA,
    .runtime = "CUDA",
    .device_label = "cuda:0",
    .backend = "nccl",
    .out_of_memory = "CUDA out of memory",
    .owner_of_memory = "GPU ",
};

const Face* chosen = &kSim;

}  // namespace

const Face& face() { return *chosen; }

void choose_face(const std::string& name) {
  TORCH_CHECK(name == kSim.name || name == kCuda.name, "there is no face ", name);
  chosen = name == kCuda.name ? &kCuda : &kSim;
}

}  // namespace sim
