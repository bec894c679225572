// The operations that cannot go through the fallback: making tensors, viewing them, copying between
// host and device, and reading a scalar.
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>

#include "fork.h"
#include "registration.h"
#include "torch_device.h"
#include "torch_readings.h"

namespace sim {
namespace {

using at::Tensor;
c10::DispatchKeySet device_keys() { return c10::DispatchKeySet(face().key); }

// ----------------------------------------------------------------------------------------- making

void check_placement(std::optional<c10::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  place_on(device);
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout>, std::optional<c10::Device> device,
             std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  check_placement(device, pinned);
  return at::detail::empty_generic(size, device_allocator(), device_keys(),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device> device, std::optional<bool> pinned) {
  check_placement(device, pinned);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), device_keys(),
                                           c10::dtype_or_default(dtype));
}

// Zeros without bytes, as autograd makes for a derivative that is none.
Tensor efficient_zeros(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                       std::optional<c10::Layout>, std::optional<c10::Device> device,
                       std::optional<bool> pinned) {
  check_placement(device, pinned);
  static at::native::ZeroTensorAllocator allocator(sim::device());
  return at::detail::empty_generic(size, &allocator,
                                   device_keys().add(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

// ---------------------------------------------------------------------------------------- copying

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking);

bool is_bitwise(const Tensor& from, const Tensor& to) {
  const bool same_layout = (from.is_contiguous() && to.is_contiguous()) ||
                           (from.strides() == to.strides() && from.is_non_overlapping_and_dense());
  return same_layout && from.dtype() == to.dtype() && from.is_conj() == to.is_conj() &&
         from.is_neg() == to.is_neg();
}

// A link moves bytes. What else a copy between host and device must do (cast, gather rows) CUDA
// does through a temporary, on the device wherever the device holds the data; so does this.
Tensor copy_to_device_staged(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor host = from.to(to.scalar_type()).contiguous();
  if (to.is_contiguous()) return copy_from(host, to, false);
  Tensor staged = at::empty(to.sizes(), to.options());
  copy_from(host, staged, false);
  return copy_from(staged, to, non_blocking);
}

Tensor copy_to_host_staged(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor staged = from;
  if (!from.is_contiguous() || from.dtype() != to.dtype() || from.is_conj() || from.is_neg()) {
    staged = at::empty(from.sizes(), from.options().dtype(to.dtype()));
    copy_from(from, staged, non_blocking);
  }
  if (to.is_contiguous()) return copy_from(staged, to, non_blocking);
  Tensor host = at::empty(to.sizes(), to.options());
  copy_from(staged, host, false);
  at::native::copy_(const_cast<Tensor&>(to), host, false);
  return to;
}

// The aliases carry raw addresses: neither the device bytes nor the host ones are kept alive by
// work that is queued. The caching allocators see to that, if the program says what it must.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  use_device();
  if (to.numel() == 0) return to;
  if (from.sizes() != to.sizes()) return copy_from(from.expand(to.sizes()), to, non_blocking);
  const bool crosses = is_sim(from) != is_sim(to);
  if (crosses && !is_bitwise(from, to)) {
    return is_sim(to) ? copy_to_device_staged(from, to, non_blocking)
                      : copy_to_host_staged(from, to, non_blocking);
  }
  Machine& machine = Machine::get();
  Launch launch{!crosses     ? "copy_ (device to device)"
                : is_sim(to) ? "copy_ (host to device)"
                             : "copy_ (device to host)",
                {},
                /*may_wait=*/true};
  const Tensor& host = is_sim(from) ? to : from;
  const bool is_pinned = crosses && machine.is_pinned(host.storage().data());
  if (crosses) launch.engine = is_sim(to) ? Engine::kToDevice : Engine::kToHost;
  launch.num_bytes = static_cast<double>(crosses ? to.nbytes() : from.nbytes() + to.nbytes());
  if (machine.checks_races()) {
    if (is_sim(from) || is_pinned) add_accesses(launch.accesses, from, false);
    if (is_sim(to) || is_pinned) add_accesses(launch.accesses, to, true);
  }
  TORCH_CHECK(!crosses || is_pinned || !machine.is_capturing(),
              "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU "
              "tensor is pinned. Please use tensor.pin_memory() or allocate the tensor with "
              "pin_memory=True.");
  const bool must_wait = crosses && (!non_blocking || !is_pinned);
  if (machine.settings().dry) {
    machine.observe(std::move(launch));
    if (must_wait) machine.synchronize_stream(Machine::current_stream());
    is_sim(to) ? note_copy(from, to) : read_to_host(from, to);
    return to;
  }
  Aliases aliases(false);
  auto work = [source = aliases.of(from), target = aliases.of(to)]() mutable {
    as_device_work([&] { at::native::copy_(target, source, false); });
  };
  if (!crosses) {
    machine.launch(std::move(launch), std::move(work));
  } else {
    PinnedUse use;
    if (is_pinned) use = {host.const_data_ptr(), host.storage().data_ptr().get_context()};
    machine.enqueue(std::move(launch), std::move(work), use);
    if (must_wait) machine.synchronize_stream(Machine::current_stream());
  }
  return to;
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  TORCH_CHECK(from.defined(), "src is undefined");
  TORCH_CHECK(!to._is_zerotensor(), "ZeroTensors are immutable; clone the tensor first");
  if (from._is_zerotensor()) return to.zero_();
  if (!to.is_same(from)) copy_from(from, to, non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  sim::resize(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

c10::Scalar local_scalar(const Tensor& tensor) {
  use_device();
  Machine& machine = Machine::get();
  if (machine.is_capturing()) machine.synchronize_stream(Machine::current_stream());  // refused
  Launch launch{"_local_scalar_dense", {}};
  launch.engine = Engine::kToHost;  // a copy, which waits behind those that are queued
  launch.num_bytes = static_cast<double>(tensor.element_size());
  if (machine.settings().dry) {  // no kernel has computed anything
    machine.observe(std::move(launch));
    machine.synchronize_stream(Machine::current_stream());
    return read_scalar(tensor);
  }
  Aliases aliases(false);
  Tensor alias = aliases.of(tensor);
  if (machine.checks_races()) add_accesses(launch.accesses, tensor, false);
  c10::Scalar scalar;
  machine.launch(std::move(launch), [&] { scalar = at::native::_local_scalar_dense_cpu(alias); });
  machine.synchronize_stream(Machine::current_stream());
  return scalar;
}

// ---------------------------------------------------------------------------------------- viewing

const Tensor& resize_(const Tensor& tensor, c10::SymIntArrayRef size,
                      std::optional<c10::MemoryFormat> format) {
  sim::resize(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
  return tensor;
}

Tensor as_strided(const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  std::optional<int64_t> plain_offset;
  if (offset) plain_offset = offset->expect_int();
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), plain_offset);
}

Tensor view(const Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}

Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  return at::native::set_(tensor, storage);
}

Tensor& set_storage_at(Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                       c10::IntArrayRef stride) {
  return at::cpu::set_(tensor, storage, offset, size, stride);
}

Tensor& set_empty(Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return at::native::set_(tensor, storage);
}

// Lets `parameter.data = tensor` and `Module.to()` keep the Parameter, as they do on CUDA.
bool has_compatible_type(const Tensor& tensor, const Tensor& source) {
  auto is_plain = [](const Tensor& t) {
    return t.layout() == c10::kStrided && (t.is_cpu() || is_sim(t)) &&
           !t.unsafeGetTensorImpl()->is_python_dispatch();
  };
  return (is_plain(tensor) && is_plain(source)) ||
         tensor.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(source.key_set());
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  Machine::get().record_stream(tensor.storage().data(), stream.id());
}

}  // namespace

RESIDENCY_KERNELS(aten, face().key, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_efficientzerotensor", efficient_zeros);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize_);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
  library.impl("set_", set_empty);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  library.impl("record_stream", record_stream);
  // Torch's own `copy_` asks PrivateUse1 for `_copy_from`; on CUDA it looks for CUDA's kernel.
  if (face().is_cuda) library.impl("copy_", copy_);
}

// A copy reads lazy conjugates and negatives itself, and a record of a stream reads no byte. Torch
// would resolve them first, by a copy; and having done so for an operation that returns nothing, it
// writes to the place of a result, outside the stack.
void add_readers_of_lazy_bits(torch::Library& library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
  library.impl("record_stream", torch::CppFunction::makeFallthrough());
}
RESIDENCY_KERNELS(aten, c10::DispatchKey::Conjugate, library) { add_readers_of_lazy_bits(library); }
RESIDENCY_KERNELS(aten, c10::DispatchKey::Negative, library) { add_readers_of_lazy_bits(library); }
RESIDENCY_KERNELS(aten, c10::DispatchKey::ZeroTensor, library) {
  library.impl("record_stream", torch::CppFunction::makeFallthrough());
}

}  // namespace sim
