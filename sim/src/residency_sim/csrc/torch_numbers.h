// The numbers that stand for values which dry mode does not compute, and what arithmetic makes of
// them. [Note: readings]
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>

#include "torch_plan.h"

namespace sim {

// Whether a scalar is plus or minus a number.
bool is_scalar(const c10::IValue& value, double number);

// What stands for each element of what an operation writes, where that is another number than 1.
std::optional<double> number_after(const std::string& name, const Arguments& arguments);

}  // namespace sim
