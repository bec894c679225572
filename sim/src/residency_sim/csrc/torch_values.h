// The tensors in an argument or a result of an operation: one, a list, or none.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>

namespace sim {

template <class Visit>
void visit_tensors(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) visit(item.toTensor());
    }
  }
}

// Whether a tensor among indices chooses by truth values.
inline bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == c10::kBool || index.scalar_type() == c10::kByte;
}

template <class Values>
int64_t most_elements(const Values& values) {
  int64_t numel = 0;
  for (const c10::IValue& value : values) {
    visit_tensors(value, [&](const at::Tensor& tensor) {
      if (tensor.defined()) numel = std::max(numel, tensor.numel());
    });
  }
  return numel;
}

template <class Replace>
c10::IValue replace_tensors(const c10::IValue& value, Replace replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    list.reserve(value.toListRef().size());
    for (const c10::IValue& item : value.toListRef()) list.push_back(replace(item.toTensor()));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<at::Tensor>(replace(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

}  // namespace sim
