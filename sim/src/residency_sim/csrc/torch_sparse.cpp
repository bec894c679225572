// Sparse tensors (COO), such as the gradients of an embedding with `sparse=True`: their indices and
// values are tensors of the device. Most of torch's kernels for them are made of operations on
// those two, and the same for each device; what CUDA has of its own stands here, made likewise.
#include <ATen/SparseTensorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "registration.h"
#include "torch_device.h"

namespace sim {
namespace {

using at::Tensor;

c10::DispatchKey sparse_key() {
  return face().is_cuda ? c10::DispatchKey::SparseCUDA : c10::DispatchKey::SparsePrivateUse1;
}

// Those of the host's kernels that read its memory. Source: `dispatch` in native_functions.yaml,
// where CPU and CUDA differ.
bool is_of_host(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::_coalesce",
      "aten::_sparse_log_softmax",
      "aten::_sparse_log_softmax_backward_data",
      "aten::_sparse_softmax",
      "aten::_sparse_softmax_backward_data",
      "aten::_sparse_sparse_matmul",
      "aten::_sparse_sum_backward",
      "aten::addmm",
      "aten::addmm_",
      "aten::bmm",
      "aten::hspmm",
      "aten::index_select",
      "aten::sspaddmm",
  };
  return names.contains(name);
}

void run_generally(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  const bool is_general = op.hasKernelForDispatchKey(c10::DispatchKey::SparseCPU);
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_general && !is_of_host(name), "The simulated accelerator does not model ", name,
      " of sparse tensors. Leave it out, or take dense tensors (sparse=False) in their place.");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::SparseCPU), stack);
}

// As a matrix with a row for each position in the sparse dimensions.
Tensor rows_of(const Tensor& dense, const Tensor& sparse) {
  int64_t num_rows = 1;
  for (const auto dim : c10::irange(sparse.sparse_dim())) num_rows *= sparse.size(dim);
  return dense.view({num_rows, num_rows ? dense.numel() / num_rows : 0});
}

// Of each value the number of its row. Torch's own function calls a kernel of the device.
Tensor positions(const Tensor& sparse) {
  const Tensor indices = sparse._indices();
  Tensor found = indices.select(0, 0);
  for (int64_t dim = 1; dim < sparse.sparse_dim(); dim++) {
    found = found.mul(sparse.size(dim)).add_(indices.select(0, dim));
  }
  return found;
}

// Torch's kernel of this is one for all devices where the gradient is sparse.
void embedding_bag_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const bool is_sparse = torch::jit::peek(*stack, /*sparse=*/9, num_arguments).toBool();
  if (!is_sparse) return fallback(op, stack);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// How many positions differ only their values say: in dry mode as many as there are.
Tensor coalesce(const Tensor& sparse) {
  const auto [found, inverse, _] = at::_unique2(positions(sparse), true, /*return_inverse=*/true);
  const Tensor given = sparse._values();
  std::vector<int64_t> sizes = given.sizes().vec();
  sizes[0] = found.numel();
  const Tensor values = at::zeros(sizes, given.options()).index_add_(0, inverse, given);
  std::vector<Tensor> indices;
  Tensor rest = found;
  for (int64_t dim = sparse.sparse_dim() - 1; dim > 0; dim--) {
    indices.insert(indices.begin(), rest.remainder(sparse.size(dim)));
    rest = rest.div(sparse.size(dim), "floor");
  }
  indices.insert(indices.begin(), rest);
  const Tensor all = indices.size() == 1 ? rest.unsqueeze(0) : at::stack(indices);
  return at::_sparse_coo_tensor_unsafe(all, values, sparse.sizes())._coalesced_(true);
}

void put(const Tensor& out, const Tensor& like, const Tensor& indices, const Tensor& values) {
  out.sparse_resize_(like.sizes(), like.sparse_dim(), like.dense_dim());
  const bool is_cast = values.scalar_type() != out.scalar_type();
  at::sparse::alias_into_sparse(out, indices, is_cast ? values.to(out.scalar_type()) : values);
}

Tensor scaled(const Tensor& values, const at::Scalar& alpha) {
  return alpha.equal(1) ? values : values.mul(alpha);
}

Tensor& add_out(const Tensor& self, const Tensor& other, const at::Scalar& alpha, Tensor& out) {
  TORCH_CHECK(self.sizes() == other.sizes(), "add: expected sizes ", self.sizes(), ", got ",
              other.sizes());
  const Tensor given = other._values();
  if (self.is_sparse()) {
    put(out, self, at::cat({self._indices(), other._indices()}, 1),
        at::cat({self._values(), scaled(given, alpha)}));
    return out._coalesced_(false);
  }
  if (!out.is_same(self)) out.resize_(self.sizes()).copy_(self);
  if (other._nnz() == 0) return out;
  // CUDA's kernel scales by the way where no position comes twice.
  const bool is_once = other.is_coalesced();
  const Tensor values = (is_once ? given : scaled(given, alpha)).to(out.scalar_type());
  const Tensor contiguous = out.contiguous();
  rows_of(contiguous, other)
      .index_add_(0, positions(other), values.reshape({values.size(0), -1}),
                  is_once ? alpha : at::Scalar(1));
  if (!out.is_same(contiguous)) out.copy_(contiguous);
  return out;
}

Tensor& mul_out(const Tensor& self, const Tensor& other, Tensor& out) {
  const Tensor& sparse = self.is_sparse() ? self : other;
  const Tensor& dense = self.is_sparse() ? other : self;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !dense.is_sparse() && (dense.dim() == 0 || dense.sizes() == sparse.sizes()),
      "The simulated accelerator multiplies sparse tensors by numbers and by dense tensors of "
      "their sizes. Leave other products out, or take dense tensors (sparse=False).");
  const Tensor given = sparse._values();
  Tensor factor = dense;
  if (dense.dim() > 0) {
    factor = rows_of(dense.contiguous(), sparse).index_select(0, positions(sparse));
    factor = factor.view(given.sizes());
  }
  const bool was_coalesced = sparse.is_coalesced();
  put(out, sparse, sparse._indices(), given.mul(factor));
  return out._coalesced_(was_coalesced);
}

}  // namespace

RESIDENCY_KERNELS(_, sparse_key(), library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_generally>());
}

// By name, too: torch's kernels for tensors of any layout would come before the fallback, and those
// of a torch that was built for CUDA read the device's memory.
RESIDENCY_KERNELS(aten, sparse_key(), library) {
  std::set<std::string> names;
  for (const auto key : {c10::DispatchKey::SparseCPU, sparse_key()}) {
    for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(key)) {
      if (name.getNamespace() == "aten") names.insert(c10::toString(name));
    }
  }
  for (const char* own : {"aten::_coalesce", "aten::add.out", "aten::mul.out"}) names.erase(own);
  for (const std::string& name : names) {
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_generally>());
  }
  library.impl("_coalesce", coalesce);
  library.impl("add.out", add_out);
  library.impl("mul.out", mul_out);
}

RESIDENCY_KERNELS(aten, face().key, library) {
  library.impl("_embedding_bag_backward",
               torch::CppFunction::makeFromBoxedFunction<&embedding_bag_backward>());
}

}  // namespace sim
