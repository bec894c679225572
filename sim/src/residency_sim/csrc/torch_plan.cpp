#include "torch_plan.h"

#include <c10/util/irange.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "torch_substitutes.h"

namespace sim {
namespace {

// As on CUDA, these take host tensors beside device ones.
const std::unordered_set<std::string>& operations_with_host_tensors() {
  static const std::unordered_set<std::string> names{
      "aten::index.Tensor",
      "aten::index.Tensor_out",
      "aten::index_put_",
      "aten::index_put",
      "aten::_index_put_impl_",
      "aten::is_set_to",
      "aten::repeat_interleave.Tensor",
  };
  return names;
}

int argument_returned(const c10::FunctionSchema& schema, const c10::Argument& result) {
  const c10::AliasInfo* wanted = result.alias_info();
  if (!wanted || !wanted->isWrite()) return -1;
  for (const auto i : c10::irange(schema.arguments().size())) {
    const c10::AliasInfo* info = schema.arguments()[i].alias_info();
    if (info && info->beforeSet() == wanted->beforeSet()) return static_cast<int>(i);
  }
  return -1;
}

Plan make_plan(const c10::FunctionSchema& schema) {
  Plan plan;
  plan.name = schema.name();
  if (!schema.overload_name().empty()) plan.name += "." + schema.overload_name();
  plan.accepts_host_tensors = operations_with_host_tensors().count(plan.name) > 0;
  plan.is_list_kernel = plan.name.find("_foreach_") != std::string::npos ||
                        plan.name.find("_fused_") != std::string::npos;
  plan.count_operations = operation_counter(plan.name);
  plan.scratch = scratch_rule(schema);
  plan.note_convolution = convolution_note(plan.name);
  plan.determinism = determinism_rule(schema);
  if (plan.name == "aten::convolution_overrideable") plan.kernel = Plan::Kernel::kConvolution;
  if (plan.name == "aten::convolution_backward_overrideable") {
    plan.kernel = Plan::Kernel::kConvolutionBackward;
  }
  if (has_substitute(schema)) plan.kernel = Plan::Kernel::kSubstitute;
  bool writes_any = false;
  bool is_random = false;
  for (const c10::Argument& argument : schema.arguments()) {
    const c10::AliasInfo* info = argument.alias_info();
    Plan::Argument entry;
    entry.writes = info && info->isWrite();
    entry.is_viewed = info && !info->isWrite();
    entry.is_generator = argument.type()->str() == "Generator?";
    writes_any |= entry.writes;
    is_random |= entry.is_generator;
    plan.arguments.push_back(entry);
  }
  bool makes_tensors = false;
  for (const c10::Argument& result : schema.returns()) {
    plan.returned_argument.push_back(argument_returned(schema, result));
    makes_tensors |= plan.returned_argument.back() < 0;
  }
  // Random kernels run in the order of the program, as CUDA reserves their numbers at the launch.
  // Replicating pads choose the strides of their output themselves, where no meta kernel tells.
  const bool restrides = plan.name.find("aten::replication_pad") == 0;
  plan.may_wait = writes_any && !makes_tensors && !is_random && !restrides;
  return plan;
}

}  // namespace

// Queued work refers to its plan, and may outlive the thread that queued it: plans are never freed.
const Plan& plan_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, const Plan*> known;
  const Plan*& plan = known[&op.schema()];
  if (!plan) {
    static auto& plans = *new std::unordered_map<const c10::FunctionSchema*, Plan>;
    static auto& lock = *new std::mutex;
    std::lock_guard<std::mutex> guard(lock);
    auto found = plans.find(&op.schema());
    if (found == plans.end()) found = plans.emplace(&op.schema(), make_plan(op.schema())).first;
    plan = &found->second;
  }
  return *plan;
}

}  // namespace sim
