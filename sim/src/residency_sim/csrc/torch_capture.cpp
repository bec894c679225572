#include "torch_capture.h"

#include <ATen/ops/copy_native.h>
#include <c10/util/irange.h>

#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "torch_generator.h"
#include "torch_values.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

// The same bytes, which it does not keep alive; a tensor of the host is read when it is captured.
IValue without_owner(const IValue& value, Aliases& aliases) {
  if (value.isDevice() && value.toDevice().type() == face().device) return c10::Device(c10::kCPU);
  return replace_tensors(value, [&](const Tensor& tensor) -> Tensor {
    if (is_sim(tensor)) return aliases.of(tensor);
    return tensor.defined() ? copy_as_read_now(tensor) : tensor;
  });
}

void bring_home(const Tensor& found, const Tensor& home) {
  if (!found.defined() || !home.defined() || home.numel() == 0) return;
  if (found.data_ptr() == home.data_ptr() && has_layout_of(found, home)) return;
  as_device_work(
      [&, to = home]() mutable { at::native::copy_(to, found.clone(), /*non_blocking=*/false); });
}

void bring_home(const IValue& found, const IValue& home) {
  std::vector<Tensor> homes;
  visit_tensors(home, [&](const Tensor& tensor) { homes.push_back(tensor); });
  size_t next = 0;
  visit_tensors(found, [&](const Tensor& tensor) { bring_home(tensor, homes.at(next++)); });
}

// Random numbers are taken anew where a replay is issued, as on CUDA from the generator of then.
std::optional<Draw> draw_for(const CapturedCall& call, int64_t numel) {
  for (const auto i : c10::irange(call.arguments.size())) {
    if (!call.plan.arguments[i].is_generator) continue;
    const IValue& value = call.arguments[i];
    return reserve(value.isNone() ? default_generator() : value.toGenerator(), numel);
  }
  return std::nullopt;
}

void replay_call(const CapturedCall& call, std::optional<Draw> draw) {
  Aliases aliases(/*dry=*/false);
  Arguments arguments;
  for (const auto i : c10::irange(call.arguments.size())) {
    const IValue& value = call.arguments[i];
    if (call.plan.arguments[i].is_generator) {
      arguments.emplace_back(numbers_at(*draw));
    } else {
      arguments.push_back(
          replace_tensors(value, [&](const Tensor& t) { return t.defined() ? aliases.of(t) : t; }));
    }
  }
  torch::jit::Stack results;
  call.run(arguments, &results);
  for (const auto i : c10::irange(arguments.size())) {
    if (call.plan.arguments[i].writes && arguments[i].isTensor()) {
      bring_home(arguments[i], call.arguments[i]);
    }
  }
  for (const auto i : c10::irange(call.results.size())) {
    if (call.plan.returned_argument[i] < 0) bring_home(results[i], call.results[i]);
  }
}

// An index by a mask finds the mask's positions first, as `nonzero` does. A fill with a number of
// the host by one mask does not. Source: expandTensors in ATen/native/IndexingUtils.h, and
// canDispatchToMaskedFill in ATen/native/TensorAdvancedIndexingUtils.h.
bool counts_a_mask(const std::string& name, const Arguments& arguments) {
  const bool is_put = name.find("index_put") != std::string::npos;
  if (!is_put && name != "aten::index.Tensor" && name != "aten::index.Tensor_out") return false;
  int num_masks = 0;
  int num_others = 0;
  visit_tensors(arguments[1], [&](const Tensor& index) {
    if (index.defined()) ++(is_mask(index) ? num_masks : num_others);
  });
  if (!is_put || num_masks != 1 || num_others > 0) return num_masks > 0;
  const Tensor& value = arguments[2].toTensor();
  return !value.is_cpu() || value.numel() != 1;
}

}  // namespace

Tensor copy_as_read_now(const Tensor& tensor) {
  Tensor copy = tensor.clone();
  // A number of Python's takes no part in type promotion; its copy must not either.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

void check_capturable(const std::string& name, const Arguments& arguments) {
  static const std::set<std::string_view> waiting = {
      "aten::_unique2",           "aten::bincount",   "aten::equal",
      "aten::masked_select",      "aten::nonzero",    "aten::repeat_interleave.Tensor",
      "aten::unique_consecutive", "aten::unique_dim", "aten::unique_dim_consecutive"};
  if (waiting.count(name) || counts_a_mask(name, arguments))
    Machine::get().synchronize_stream(Machine::current_stream());
}

void capture_call(Launch&& launch, CapturedCall call) {
  Aliases aliases(/*dry=*/false);
  const int64_t numel = most_elements(call.arguments);
  for (IValue& value : call.arguments) value = without_owner(value, aliases);
  for (IValue& value : call.results) value = without_owner(value, aliases);
  auto shared = std::make_shared<const CapturedCall>(std::move(call));
  Machine::get().capture_issue(std::move(launch), [shared, numel] {
    return [shared, draw = draw_for(*shared, numel)] { replay_call(*shared, draw); };
  });
}

}  // namespace sim
