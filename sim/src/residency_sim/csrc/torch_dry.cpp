#include "torch_dry.h"

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/core/function_schema.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/irange.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch_readings.h"
#include "torch_values.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Rule = std::function<void(const DryCall&)>;

// Up to so many bytes of operands the CPU's kernel runs over zeros: an instant, and no more memory
// than a test has.
constexpr size_t kMostZeroBytes = size_t(64) << 20;

Tensor meta(c10::IntArrayRef sizes, c10::ScalarType type) {
  return at::empty(sizes, at::TensorOptions().device(c10::kMeta).dtype(type));
}

Tensor meta_like(const Tensor& tensor) {
  return at::empty_like(tensor, at::TensorOptions(), at::MemoryFormat::Contiguous);
}

int64_t option(const IValue& value, int64_t otherwise) {
  return value.isInt() ? value.toInt() : otherwise;
}

// ----------------------------------------------------------------------------------------- results

Rule like(size_t argument) {
  return [argument](const DryCall& call) {
    call.results.emplace_back(meta_like(call.aliased[argument].toTensor()));
  };
}

// Writes into the last argument, `out=`, as a kernel that resizes it.
void into_out(const DryCall& call, c10::IntArrayRef sizes) {
  const Tensor out = call.aliased.back().toTensor();
  if (out.sizes() != sizes) out.resize_(sizes);
  call.results.emplace_back(out);
}

// Sizes that depend on values are those of the values, where they are known.
Rule unless_known(Rule rule) {
  return [rule = std::move(rule)](const DryCall& call) {
    if (!call.computed) return rule(call);
    for (const IValue& result : call.computed->results) {
      const bool is_tensor = result.isTensor() && result.toTensor().defined();
      const Tensor found = is_tensor ? result.toTensor() : Tensor();
      call.results.push_back(is_tensor ? IValue(meta(found.sizes(), found.scalar_type())) : result);
    }
  };
}

// Every mask is true everywhere, and every element differs from zero: an upper bound of the rows
// that CUDA makes. [Note: guesses]
void tell_of_mask(const Tensor& mask) {
  if (mask.numel() > 1 && dry_reading(mask) != Reading::kTrue) tell_of_guess("mask", mask.numel());
}

// What was noted as zero has none.
int64_t num_rows(const DryCall& call) {
  const Tensor& given = call.arguments[0].toTensor();
  if (dry_reading(given) == Reading::kZero) return 0;
  tell_of_mask(given);
  return given.numel();
}

void nonzero(const DryCall& call) {
  const int64_t num_dims = call.aliased[0].toTensor().dim();
  call.results.emplace_back(meta({num_rows(call), num_dims}, c10::kLong));
}

void nonzero_out(const DryCall& call) {
  into_out(call, {num_rows(call), call.aliased[0].toTensor().dim()});
}

int64_t num_selected(const DryCall& call) {
  const auto sizes =
      at::infer_size(call.aliased[0].toTensor().sizes(), call.aliased[1].toTensor().sizes());
  int64_t num = c10::multiply_integers(sizes);
  const Tensor& given = call.arguments[1].toTensor();
  const auto mask = known_value(given);
  if (mask) as_device_work([&] { num = mask->expand(sizes).count_nonzero().item<int64_t>(); });
  if (!mask) tell_of_mask(given);
  return num;
}

void masked_select(const DryCall& call) {
  call.results.emplace_back(meta({num_selected(call)}, call.aliased[0].toTensor().scalar_type()));
}

void masked_select_out(const DryCall& call) { into_out(call, {num_selected(call)}); }

// (input, [dim], .., return_inverse, return_counts) -> (values, inverse, counts)
// Who asks where each value comes from takes memory for them: each is taken to differ, an upper
// bound. Who asks for the values alone checks them, or loops over them: they all read as 1, and so
// are one.
struct Unique {
  int dim = -1;
  int inverse = -1;
  int counts = -1;
  size_t num_results = 3;
};

Rule unique(Unique at) {
  return [at](const DryCall& call) {
    const Tensor& input = call.aliased[0].toTensor();
    auto asked = [&](int argument) { return argument >= 0 && call.aliased[argument].toBool(); };
    int64_t length = input.numel();
    std::vector<int64_t> values{length};
    std::vector<int64_t> inverse = input.sizes().vec();
    if (at.dim >= 0 && call.aliased[at.dim].isInt()) {
      const int64_t dim = c10::maybe_wrap_dim(call.aliased[at.dim].toInt(), input.dim());
      length = input.dim() ? input.size(dim) : 1;
      values = input.sizes().vec();
      inverse = {length};
    }
    const bool is_one = values.size() == 1 && !asked(at.inverse) && !asked(at.counts);
    if (length > 1) tell_of_guess(is_one ? "one" : "each", length);
    if (is_one) values[0] = std::min<int64_t>(length, 1);
    call.results.emplace_back(meta(values, input.scalar_type()));
    if (!asked(at.inverse)) inverse = {0};
    call.results.emplace_back(meta(inverse, c10::kLong));
    if (at.num_results == 2) return;
    call.results.emplace_back(meta({asked(at.counts) ? length : 0}, c10::kLong));
  };
}

void bincount(const DryCall& call) {
  const bool is_weighted = call.aliased[1].isTensor() && call.aliased[1].toTensor().defined();
  auto type = c10::kLong;
  if (is_weighted) {
    const auto given = call.aliased[1].toTensor().scalar_type();
    type = given == c10::kFloat ? c10::kFloat : c10::kDouble;
  }
  call.results.emplace_back(meta({std::max<int64_t>(1, option(call.aliased[2], 0))}, type));
}

// Each row once: the placeholder of a number is 1.
void repeat_interleave(const DryCall& call) {
  const Tensor& repeats = call.aliased[0].toTensor();
  const bool is_known = call.aliased[1].isInt();
  if (!is_known) tell_of_guess("repeats", repeats.numel());
  const int64_t length = option(call.aliased[1], repeats.numel());
  call.results.emplace_back(meta({length}, repeats.scalar_type()));
}

// Torch asks so whether a check of its own holds (`is_scalar_tensor_true`). A tensor is equal to
// itself.
void equal(const DryCall& call) {
  const Tensor& one = call.arguments[0].toTensor();
  const Tensor& other = call.arguments[1].toTensor();
  const bool is_one = one.is_alias_of(other) && one.storage_offset() == other.storage_offset() &&
                      one.sizes() == other.sizes() && one.strides() == other.strides() &&
                      one.scalar_type() == other.scalar_type();
  const bool holds = is_one || dry_reading(one) == Reading::kHolds;
  call.results.emplace_back(holds || read_truth(Reading::kUnknown));
}

// CUDA's kernel has no use for the buffer.
void log_sigmoid(const DryCall& call) {
  const Tensor& input = call.aliased[0].toTensor();
  call.results.emplace_back(at::empty_like(input));
  call.results.emplace_back(meta({0}, input.scalar_type()));
}

// (log_probs [T, N, C], targets [N, S] or [all], input_lengths, target_lengths, ..)
void ctc_loss(const DryCall& call) {
  const Tensor& log_probs = call.aliased[0].toTensor();
  const Tensor& targets = call.aliased[1].toTensor();
  const int64_t longest = targets.dim() == 2 ? targets.size(1) : targets.numel();
  const auto type = log_probs.scalar_type();
  const int64_t num_samples = log_probs.size(1);
  call.results.emplace_back(meta({num_samples}, type));
  call.results.emplace_back(meta({num_samples, log_probs.size(0), 2 * longest + 1}, type));
}

// Lengths that were read from the device may be placeholders, ones: an upper bound then.
void ctc_loss_of_lengths(const DryCall& call) {
  const auto lengths = call.aliased[3].toIntVector();
  const bool is_known = std::any_of(lengths.begin(), lengths.end(), [](auto n) { return n > 1; });
  return is_known ? call.call_meta() : ctc_loss(call);
}

void mode_out(const DryCall& call) {
  const Tensor& input = call.aliased[0].toTensor();
  std::vector<int64_t> sizes = input.sizes().vec();
  if (input.dim()) {
    const auto dim = c10::maybe_wrap_dim(option(call.aliased[1], -1), input.dim());
    if (call.aliased[2].toBool()) {
      sizes[dim] = 1;
    } else {
      sizes.erase(sizes.begin() + dim);
    }
  }
  for (const size_t result : {3, 4}) {
    const Tensor out = call.aliased[result].toTensor();
    if (out.sizes() != c10::IntArrayRef(sizes)) out.resize_(sizes);
    call.results.emplace_back(out);
  }
}

// ------------------------------------------------------------------ batch norm over several ranks

// Statistics of half precision are floats, one for each channel.
Tensor per_channel(const Tensor& input) {
  return meta({input.size(1)}, at::toOpMathType(input.scalar_type()));
}

void two_per_channel(const DryCall& call) {
  const Tensor input = call.aliased[0].toTensor();
  call.results.emplace_back(per_channel(input));
  call.results.emplace_back(per_channel(input));
}

// Sums that were not asked for are undefined.
void reduced_per_channel(const DryCall& call) {
  const Tensor input = call.aliased[1].toTensor();
  const bool is_asked[] = {call.aliased[5].toBool(), call.aliased[5].toBool(),
                           call.aliased[6].toBool(), call.aliased[7].toBool()};
  for (const bool is : is_asked) call.results.emplace_back(is ? per_channel(input) : Tensor());
}

// ----------------------------------------------------------------------------------------- indices

int64_t num_true(const std::optional<Tensor>& mask) {
  const auto known = known_value(*mask);
  int64_t num = mask->numel();
  if (known) as_device_work([&] { num = known->count_nonzero().item<int64_t>(); });
  if (!known) tell_of_mask(*mask);
  return num;
}

// A mask among indices stands for as many positions as it has elements, in each of its dimensions.
void index_by_masks(const DryCall& call) {
  Arguments aliased = call.aliased;
  c10::List<std::optional<Tensor>> indices;
  const auto masks = call.arguments[1].toOptionalTensorList();
  const auto metas = call.aliased[1].toOptionalTensorList();
  for (const auto i : c10::irange(metas.size())) {
    const std::optional<Tensor> index = metas[i];
    if (!index || !index->defined() || !is_mask(*index)) {
      indices.push_back(index);
      continue;
    }
    for (int64_t dim = 0; dim < index->dim(); dim++) {
      indices.push_back(meta({num_true(masks[i])}, c10::kLong));
    }
  }
  aliased[1] = indices;
  call.call(c10::DispatchKey::Meta, aliased, call.results);
}

const Rule* rule_for(const std::string& name) {
  static const std::unordered_map<std::string, Rule> rules{
      {"aten::_ctc_loss", ctc_loss_of_lengths},
      {"aten::_ctc_loss.Tensor", ctc_loss},
      {"aten::_ctc_loss_backward", like(1)},
      {"aten::_ctc_loss_backward.Tensor", like(1)},
      {"aten::_dirichlet_grad", like(0)},
      {"aten::_logcumsumexp", like(0)},
      {"aten::_masked_softmax", like(0)},
      {"aten::_masked_softmax_backward", like(0)},
      {"aten::_sample_dirichlet", like(0)},
      {"aten::_standard_gamma_grad", like(0)},
      {"aten::_unique", unless_known(unique({.inverse = 2, .num_results = 2}))},
      {"aten::_unique2", unless_known(unique({.inverse = 2, .counts = 3}))},
      {"aten::batch_norm_backward_elemt", like(1)},
      {"aten::batch_norm_backward_reduce", reduced_per_channel},
      {"aten::batch_norm_elemt", like(0)},
      {"aten::batch_norm_gather_stats_with_counts", two_per_channel},
      {"aten::batch_norm_stats", two_per_channel},
      {"aten::bincount", unless_known(bincount)},
      {"aten::binomial", like(0)},
      {"aten::equal", unless_known(equal)},
      {"aten::fractional_max_pool3d_backward", like(1)},
      {"aten::glu_backward_jvp", like(0)},
      {"aten::glu_jvp", like(0)},
      {"aten::index.Tensor", index_by_masks},
      {"aten::index.Tensor_out", index_by_masks},
      {"aten::index_put", index_by_masks},
      {"aten::index_put_", index_by_masks},
      {"aten::_index_put_impl_", index_by_masks},
      {"aten::_unsafe_index.Tensor", index_by_masks},
      {"aten::log_sigmoid_forward", log_sigmoid},
      {"aten::masked_select", unless_known(masked_select)},
      {"aten::masked_select.out", masked_select_out},
      {"aten::mode.values", mode_out},
      {"aten::multi_margin_loss_backward", like(1)},
      {"aten::multilabel_margin_loss_backward", like(1)},
      {"aten::nonzero", unless_known(nonzero)},
      {"aten::nonzero.out", nonzero_out},
      {"aten::repeat_interleave.Tensor", unless_known(repeat_interleave)},
      {"aten::unique_consecutive", unless_known(unique({.dim = 3, .inverse = 1, .counts = 2}))},
      {"aten::unique_dim", unless_known(unique({.dim = 1, .inverse = 3, .counts = 4}))},
      {"aten::unique_dim_consecutive", unless_known(unique({.dim = 1, .inverse = 2, .counts = 3}))},
  };
  const auto found = rules.find(name);
  return found == rules.end() ? nullptr : &found->second;
}

// ------------------------------------------------------------------------- without a meta kernel

// The CPU's tensors over zeros in place of meta ones, which share storages as those do.
class Zeros {
 public:
  IValue of(const IValue& value) {
    return replace_tensors(value, [&](const Tensor& tensor) -> Tensor {
      return tensor.defined() && tensor.is_meta()
                 ? tensor_over(zeros_of(tensor.storage()), tensor, c10::DispatchKey::CPU)
                 : tensor;
    });
  }

  IValue back(const IValue& value) {
    return replace_tensors(value, [&](const Tensor& tensor) -> Tensor {
      return tensor.defined() && tensor.is_cpu()
                 ? tensor_over(meta_of(tensor.storage()), tensor, c10::DispatchKey::Meta)
                 : tensor;
    });
  }

  size_t num_bytes() const { return num_bytes_; }

 private:
  const c10::Storage& zeros_of(const c10::Storage& like) {
    for (const auto& [meta, zeros] : pairs_) {
      if (meta.unsafeGetStorageImpl() == like.unsafeGetStorageImpl()) return zeros;
    }
    const size_t num_bytes = like.nbytes();
    num_bytes_ += num_bytes;
    auto* allocator = c10::GetCPUAllocator();
    const bool is_too_much = num_bytes_ > kMostZeroBytes;
    c10::Storage zeros(c10::Storage::use_byte_size_t(), is_too_much ? 0 : num_bytes, allocator,
                       /*resizable=*/true);
    if (zeros.nbytes()) std::memset(zeros.mutable_data(), 0, num_bytes);
    pairs_.emplace_back(like, std::move(zeros));
    return pairs_.back().second;
  }

  c10::Storage meta_of(const c10::Storage& like) {
    for (const auto& [meta, zeros] : pairs_) {
      if (zeros.unsafeGetStorageImpl() == like.unsafeGetStorageImpl()) return meta;
    }
    c10::Storage meta(c10::Storage::use_byte_size_t(), like.nbytes(),
                      at::DataPtr(nullptr, c10::kMeta), c10::GetAllocator(c10::kMeta), true);
    pairs_.emplace_back(std::move(meta), like);
    return pairs_.back().first;
  }

  std::vector<std::pair<c10::Storage, c10::Storage>> pairs_;
  size_t num_bytes_ = 0;
};

bool makes_tensors(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    if (!result.alias_info() || !result.alias_info()->isWrite()) return true;
  }
  return false;
}

bool takes_out(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.is_out()) return true;
  }
  return false;
}

// What only writes where its arguments lie makes nothing that has a shape.
void return_written(const DryCall& call) {
  for (const c10::Argument& result : call.schema.returns()) {
    for (const auto i : c10::irange(call.schema.arguments().size())) {
      const c10::AliasInfo* info = call.schema.arguments()[i].alias_info();
      if (info && *info == *result.alias_info()) call.results.push_back(call.aliased[i]);
    }
  }
}

void take_form(const Tensor& meta, const Tensor& resized) {
  c10::StorageImpl* storage = meta.storage().unsafeGetStorageImpl();
  storage->set_nbytes(std::max(storage->nbytes(), resized.storage().nbytes()));
  meta.unsafeGetTensorImpl()->set_sizes_and_strides(resized.sizes(), resized.strides(),
                                                    resized.storage_offset());
}

[[noreturn]] void refuse(const DryCall& call, const std::string& why) {
  C10_THROW_ERROR(NotImplementedError,
                  "Dry mode cannot tell the shapes that " + call.name + " gives: " + why +
                      ". Leave this call out of the dry run, or make tensors of the shapes that "
                      "you expect in its place.");
}

void run_over_zeros(const DryCall& call) {
  Zeros zeros;
  Arguments host;
  for (const IValue& value : call.aliased) {
    const bool is_device = value.isDevice() && value.toDevice().is_meta();
    host.push_back(is_device ? IValue(c10::Device(c10::kCPU)) : zeros.of(value));
  }
  if (zeros.num_bytes() > kMostZeroBytes) {
    refuse(call, "torch has no meta kernel for it, and its operands, " +
                     std::to_string(zeros.num_bytes()) + " bytes, are too large to run the CPU's");
  }
  Stack results;
  try {
    call.call(c10::DispatchKey::CPU, host, results);
  } catch (const c10::Error& error) {
    refuse(call, "torch has no meta kernel for it, and over zeros the CPU's says: " +
                     std::string(error.what_without_backtrace()));
  }
  for (const auto i : c10::irange(host.size())) {
    const bool is_changed =
        host[i].isTensor() && host[i].toTensor().defined() && call.aliased[i].toTensor().is_meta();
    if (is_changed) take_form(call.aliased[i].toTensor(), host[i].toTensor());
  }
  for (const IValue& result : results) call.results.push_back(zeros.back(result));
}

// Whether an error of a meta kernel in Python says that there is none: so does a fake kernel that
// makes a size of its own, as torchvision's `nms` does. Source of the message: `error_on_ctx` in
// torch/_library/fake_impl.py.
bool says_there_is_none(pybind11::handle type, pybind11::handle value) {
  if (PyErr_GivenExceptionMatches(type.ptr(), PyExc_NotImplementedError)) return true;
  return pybind11::str(value).cast<std::string>().find("get_ctx()") != std::string::npos;
}

// Runs the meta kernel; returns false where torch has none.
bool has_run_meta(const DryCall& call) {
  try {
    call.call_meta();
    return true;
  } catch (const c10::NotImplementedError&) {
  } catch (python_error& error) {  // of a kernel in Python, where the dispatcher calls it
    pybind11::gil_scoped_acquire held;
    error.persist();  // until then it is the thread's
    if (!says_there_is_none(error.type, error.value)) throw;
  } catch (pybind11::error_already_set& error) {  // or where pybind does
    pybind11::gil_scoped_acquire held;
    if (!says_there_is_none(error.type(), error.value())) throw;
  }
  call.results.clear();
  return false;
}

}  // namespace

void run_dry(const DryCall& call) {
  if (const Rule* rule = rule_for(call.name)) return as_device_work([&] { (*rule)(call); });
  if (has_run_meta(call)) return;
  if (!makes_tensors(call.schema) && !takes_out(call.schema)) return return_written(call);
  run_over_zeros(call);
}

}  // namespace sim
