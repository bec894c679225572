// What the torch-facing files share: the device's identity, its allocator, and CPU (or meta)
// aliases of its tensors, on which torch's own CPU kernels do the device's work.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>
#include <vector>

#include "devices.h"
#include "face.h"
#include "machine.h"

namespace sim {

// The one that tensors are on; as long as that is open, the calling thread's. [Note: several
// devices]
inline c10::Device device() {
  const int index = machine_index() < 0 ? current_device() : machine_index();
  return {face().device, static_cast<c10::DeviceIndex>(index)};
}
// Has tensors made on a device, by default the calling thread's; raises where they are on another.
void place_on(std::optional<c10::Device> device);

inline bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == face().device;
}

// Tells torch of the device: allocators, guard and hooks.
void register_device();
c10::Allocator* device_allocator();
const at::Generator& default_generator();
void copy_on_device(void* to, const void* from, size_t num_bytes);
void resize_storage(const c10::Storage& storage, size_t num_bytes);
void resize(const at::Tensor& tensor, c10::IntArrayRef size,
            std::optional<c10::MemoryFormat> format);

// Makes a tensor over `storage` with the layout of `like`.
at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key);

// A tensor's layout: all that a kernel chooses for a result beside its bytes, that is its sizes,
// strides and offset, and whether it stands for their conjugates, their negatives, or for zeros.
bool has_layout_of(const at::Tensor& tensor, const at::Tensor& like);
void take_layout_of(const at::Tensor& tensor, const at::Tensor& like);

// CPU tensors over the bytes of simulated ones (in dry mode: meta tensors, which have none).
// Tensors that share a storage get aliases that share one, so that kernels see overlaps. An alias
// does not keep the device bytes alive: queued work may outlive its tensors, exactly as on a real
// device.
class Aliases {
 public:
  explicit Aliases(bool dry) : dry_(dry) {}
  at::Tensor of(const at::Tensor& tensor);
  // A tensor of the simulated device that owns the storage behind this alias, or nullptr.
  const at::Tensor* original(const c10::StorageImpl* alias) const;
  c10::DispatchKey key() const { return dry_ ? c10::DispatchKey::Meta : c10::DispatchKey::CPU; }

 private:
  struct Entry {
    at::Tensor original;
    c10::Storage alias;
  };
  bool dry_;
  c10::SmallVector<Entry, 4> entries_;  // a handful; a linear search beats a hash
};

// Runs a kernel as the device would: below autograd, autocast and every Python mode.
template <class Work>
void as_device_work(Work&& work) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  static const c10::DispatchKeySet modes =
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::PythonDispatcher}) |
      c10::autocast_dispatch_keyset;
  c10::impl::ExcludeDispatchKeyGuard no_modes(modes);
  work();
}

// How many arithmetic operations a call does, by its arguments; nullptr where memory is what it
// costs.
using OperationCounter = double (*)(const c10::IValue* arguments);
OperationCounter operation_counter(const std::string& name);

// Adds the bytes that a strided tensor covers, row by row where that is exact and not too many
// rows.
void add_accesses(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes);

}  // namespace sim
