#include <c10/core/CPUAllocator.h>

#include <algorithm>

#include "torch_device.h"

namespace sim {
namespace {

constexpr int64_t kMostRows = 1024;  // above it the whole span counts as touched

constexpr c10::DispatchKeySet kLazyKeys({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor});

void keep(void*) {}  // an alias does not own its bytes

}  // namespace

bool has_layout_of(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.sizes() == like.sizes() && tensor.strides() == like.strides() &&
         tensor.storage_offset() == like.storage_offset() &&
         (tensor.key_set() & kLazyKeys) == (like.key_set() & kLazyKeys);
}

void take_layout_of(const at::Tensor& tensor, const at::Tensor& like) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
}

at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  // Only a new tensor can stand for zeros: torch lets none become one.
  const auto keys = c10::DispatchKeySet(key) | (like.key_set() & kLazyKeys);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  take_layout_of(tensor, like);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

at::Tensor Aliases::of(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.original.storage().unsafeGetStorageImpl() == storage;
  });
  if (found == entries_.end()) {
    void* data = const_cast<void*>(storage->data());
    at::DataPtr pointer = dry_ ? at::DataPtr(nullptr, c10::kMeta)
                               : at::DataPtr(data, data, &keep, c10::Device(c10::kCPU));
    auto* allocator = dry_ ? c10::GetAllocator(c10::kMeta) : c10::GetCPUAllocator();
    c10::Storage alias(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(pointer),
                       allocator, /*resizable=*/true);
    entries_.push_back({tensor, std::move(alias)});
    found = std::prev(entries_.end());
  }
  return tensor_over(found->alias, tensor, key());
}

const at::Tensor* Aliases::original(const c10::StorageImpl* alias) const {
  for (const Entry& entry : entries_) {
    if (entry.alias.unsafeGetStorageImpl() == alias) return &entry.original;
  }
  return nullptr;
}

void add_accesses(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto item = static_cast<int64_t>(tensor.itemsize());
  // Dimensions from the innermost outwards; those that continue a run of bytes join it.
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), in items
  for (int64_t d = 0; d < tensor.dim(); d++) {
    if (tensor.size(d) > 1 && tensor.stride(d) != 0)
      dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first == run) run *= dims[inner++].second;
  int64_t num_rows = 1;
  int64_t span = run;
  for (size_t d = inner; d < dims.size(); d++) {
    num_rows *= dims[d].second;
    span += (dims[d].second - 1) * dims[d].first;
  }
  if (num_rows > kMostRows) {
    accesses.push_back({begin, begin + static_cast<uintptr_t>(span * item), writes});
    return;
  }
  for (int64_t row = 0; row < num_rows; row++) {
    int64_t offset = 0;
    int64_t rest = row;
    for (size_t d = inner; d < dims.size(); d++) {
      offset += rest % dims[d].second * dims[d].first;
      rest /= dims[d].second;
    }
    const uintptr_t start = begin + static_cast<uintptr_t>(offset * item);
    accesses.push_back({start, start + static_cast<uintptr_t>(run * item), writes});
  }
}

}  // namespace sim
