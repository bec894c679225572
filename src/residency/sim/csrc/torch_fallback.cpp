// Every operation that has no kernel of its own runs torch's CPU kernel on CPU aliases of the
// device's tensors: no bytes are copied, views and in-place operations work, and temporaries that
// CUDA would allocate on the device before the kernel runs (the outputs) are allocated on this one.
//
// at::native::cpu_fallback is not used: it copies every operand and cannot write through views.
#include <c10/util/SmallVector.h>
#include <c10/util/irange.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "fork.h"
#include "registration.h"
#include "torch_device.h"
#include "torch_scratch.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr size_t kMostCheckedShapes = 10000;

using Arguments = c10::SmallVector<IValue, 8>;  // most operations take fewer: no allocation

// What a schema says, read once.
struct Plan {
  struct Argument {
    bool writes = false;
    bool is_viewed = false;  // the result aliases it and no byte of it is read
    bool is_generator = false;
  };
  std::string name;
  std::vector<Argument> arguments;
  std::vector<int> returned_argument;  // which argument a result is, or -1
  bool may_wait = false;
  bool is_list_kernel = false;
  bool accepts_host_tensors = false;
  OperationCounter count_operations = nullptr;
  ScratchRule scratch;
  // The *_overrideable convolutions have no CPU kernel; the operations they stand for have.
  enum class Kernel { kOwn, kConvolution, kConvolutionBackward } kernel = Kernel::kOwn;
};

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
  if (plan.name == "aten::convolution_overrideable") plan.kernel = Plan::Kernel::kConvolution;
  if (plan.name == "aten::convolution_backward_overrideable") {
    plan.kernel = Plan::Kernel::kConvolutionBackward;
  }
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
  plan.may_wait = writes_any && !makes_tensors && !is_random;
  return plan;
}

const Plan& plan_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Plan> plans;
  auto found = plans.find(&op.schema());
  if (found == plans.end()) found = plans.emplace(&op.schema(), make_plan(op.schema())).first;
  return found->second;
}

template <class Visit>
void visit_tensors(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const IValue& item : value.toListRef()) {
      if (item.isTensor()) visit(item.toTensor());
    }
  }
}

template <class Replace>
IValue replace_tensors(const IValue& value, Replace replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    list.reserve(value.toListRef().size());
    for (const IValue& item : value.toListRef()) list.push_back(replace(item.toTensor()));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<Tensor>(replace(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

void call_kernel(const c10::OperatorHandle& op, Plan::Kernel kernel, c10::DispatchKey key,
                 const Arguments& arguments, Stack* stack) {
  as_device_work([&] {
    if (kernel == Plan::Kernel::kOwn) {
      stack->insert(stack->end(), arguments.begin(), arguments.end());
      op.redispatchBoxed(c10::DispatchKeySet(key), stack);
    } else if (kernel == Plan::Kernel::kConvolution) {
      static const auto convolution =
          c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
      stack->insert(stack->end(), arguments.begin(), arguments.end());
      convolution.callBoxed(stack);
    } else {
      static const auto backward =
          c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
      const int64_t num_output_channels = arguments[0].toTensor().size(1);
      stack->insert(stack->end(), arguments.begin(), arguments.begin() + 3);
      stack->push_back(std::vector<int64_t>{num_output_channels});  // the sizes of the bias
      stack->insert(stack->end(), arguments.begin() + 3, arguments.end());
      backward.callBoxed(stack);
    }
  });
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), plan_(plan_of(op)), stack_(stack), aliases_(machine_.settings().dry) {
    const auto first = stack->end() - static_cast<std::ptrdiff_t>(plan_.arguments.size());
    arguments_.assign(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
    stack->erase(first, stack->end());
  }

  void run() {
    use_device();
    check_devices();
    aliased_ = alias_arguments(aliases_);
    if (can_be_queued()) return queue();
    auto work = [&] { call_kernel(op_, plan_.kernel, aliases_.key(), aliased_, stack_); };
    if (is_dry()) {
      machine_.observe(make_launch(false));
      work();  // meta kernels may be Python: no lock of ours is held around them
    } else {
      machine_.launch(make_launch(false), work);
    }
    resize_outputs();
    adopt_results();
    take_scratch();
  }

 private:
  bool is_dry() const { return machine_.settings().dry; }

  void check_devices() const {
    if (plan_.accepts_host_tensors) return;
    bool on_device = false;
    bool on_host = false;
    auto look = [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      on_device |= is_sim(tensor);
      on_host |= tensor.is_cpu() && tensor.dim() > 0;
    };
    for (const IValue& argument : arguments_) visit_tensors(argument, look);
    TORCH_CHECK(!(on_device && on_host),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                kDeviceLabel, " and cpu! (when running ", plan_.name, ")");
  }

  IValue alias_of(const IValue& value, Aliases& aliases, const Plan::Argument& argument) const {
    if (value.isTensor() && is_sim(value.toTensor())) return aliases.of(value.toTensor());
    const bool to_meta = aliases.key() == c10::DispatchKey::Meta;
    if (value.isDevice() && value.toDevice().type() == kSimDevice) {
      return c10::Device(to_meta ? c10::kMeta : c10::kCPU);
    }
    if (argument.is_generator) {
      return inner_generator(value.isNone() ? default_generator() : value.toGenerator());
    }
    return replace_tensors(value, [&](const Tensor& tensor) -> Tensor {
      if (is_sim(tensor)) return aliases.of(tensor);
      return to_meta && tensor.defined() && tensor.dim() > 0 ? tensor.to(c10::kMeta) : tensor;
    });
  }

  Arguments alias_arguments(Aliases& aliases) {
    Arguments aliased;
    for (const auto i : c10::irange(arguments_.size())) {
      aliased.push_back(alias_of(arguments_[i], aliases, plan_.arguments[i]));
    }
    return aliased;
  }

  Launch make_launch(bool may_wait) const {
    Launch launch{plan_.name.c_str(), {}, may_wait};
    if (!machine_.checks_races() && !machine_.has_clock()) return launch;
    for (const auto i : c10::irange(arguments_.size())) {
      const Plan::Argument& argument = plan_.arguments[i];
      if (argument.is_viewed) continue;
      visit_tensors(arguments_[i], [&](const Tensor& tensor) {
        if (!is_sim(tensor)) return;
        if (machine_.checks_races()) add_accesses(launch.accesses, tensor, argument.writes);
        launch.num_bytes += static_cast<double>(tensor.nbytes());
      });
    }
    if (plan_.count_operations) launch.num_operations = plan_.count_operations(arguments_.data());
    return launch;
  }

  // ------------------------------------------------------------------------------ running it later

  // A kernel can be late only where lateness can be told, and if all that it writes exists already.
  // Its meta kernel makes the checks of a launch and finds the sizes of `out=` tensors; since many
  // are slow Python, a call is checked once for its shapes. The list kernels skip that: they never
  // resize.
  bool can_be_queued() {
    if (!plan_.may_wait || is_dry() || machine_.is_alone()) return false;
    for (const auto i : c10::irange(arguments_.size())) {
      bool writes_host = false;
      visit_tensors(arguments_[i],
                    [&](const Tensor& t) { writes_host |= t.defined() && !is_sim(t); });
      if (plan_.arguments[i].writes && writes_host) return false;
    }
    if (plan_.is_list_kernel) return true;
    thread_local std::unordered_map<std::string, bool> checked;
    if (checked.size() > kMostCheckedShapes) checked.clear();
    auto [entry, is_new] = checked.try_emplace(shape_key(), false);
    if (is_new) entry->second = passes_meta_kernel();
    return entry->second;
  }

  // All that a meta kernel looks at: the operation, and its arguments but for the bytes of tensors.
  std::string shape_key() const {
    std::string key = plan_.name;
    auto add = [&](int64_t number) {
      key.append(reinterpret_cast<const char*>(&number), sizeof(number));
    };
    for (const IValue& value : arguments_) {
      add(static_cast<int64_t>(value.isTensor()));
      visit_tensors(value, [&](const Tensor& tensor) {
        if (!tensor.defined()) return;
        add(static_cast<int64_t>(tensor.scalar_type()));
        add(tensor.dim());
        for (const int64_t size : tensor.sizes()) add(size);
        for (const int64_t stride : tensor.strides()) add(stride);
      });
      if (value.isInt()) add(value.toInt());
      if (value.isBool()) add(value.toBool());
      if (value.isIntList()) {
        for (const int64_t number : value.toIntVector()) add(number);
      }
    }
    return key;
  }

  bool passes_meta_kernel() {
    Aliases shapes(/*dry=*/true);
    Stack results;
    const Arguments aliased = alias_arguments(shapes);
    try {
      call_kernel(op_, plan_.kernel, shapes.key(), aliased, &results);
    } catch (const std::exception&) {
      return false;  // no meta kernel, or a real error, which the kernel itself words better
    }
    for (const auto i : c10::irange(arguments_.size())) {  // would it resize what it writes?
      if (!plan_.arguments[i].writes || !arguments_[i].isTensor()) continue;
      const Tensor& before = arguments_[i].toTensor();
      if (before.defined() && before.sizes() != aliased[i].toTensor().sizes()) return false;
    }
    return true;
  }

  void queue() {
    for (IValue& value : aliased_) {  // host scalars are read at the launch, as on CUDA
      value = replace_tensors(value, [&](const Tensor& tensor) {
        const bool is_alias =
            !tensor.defined() || aliases_.original(tensor.storage().unsafeGetStorageImpl());
        if (is_alias) return tensor;
        Tensor copy = tensor.clone();
        // A number of Python's takes no part in type promotion; its copy must not either.
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
          copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        }
        return copy;
      });
    }
    const auto key = aliases_.key();
    machine_.launch(make_launch(true),
                    [op = op_, kernel = plan_.kernel, key, aliased = std::move(aliased_)] {
                      Stack results;
                      call_kernel(op, kernel, key, aliased, &results);
                    });
    for (const int argument : plan_.returned_argument) {
      stack_->push_back(arguments_[static_cast<size_t>(argument)]);
    }
    take_scratch();
  }

  void take_scratch() {
    if (!plan_.scratch.takes_any()) return;
    charge_scratch(plan_.scratch, arguments_.data(), arguments_.size(), stack_->back());
  }

  // --------------------------------------------------------------------------------- its results

  // A kernel resizes `out=` tensors by resizing the alias, whose bytes are then the host's.
  void resize_outputs() {
    for (const auto i : c10::irange(arguments_.size())) {
      if (!plan_.arguments[i].writes || !arguments_[i].isTensor()) continue;
      const Tensor& tensor = arguments_[i].toTensor();
      if (!is_sim(tensor)) continue;
      const Tensor& alias = aliased_[i].toTensor();
      const bool has_moved = !is_dry() && alias.storage().data() != tensor.storage().data();
      if (!has_moved && alias.sizes() == tensor.sizes() && alias.strides() == tensor.strides())
        continue;
      resize(tensor, alias.sizes(), std::nullopt);
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                          alias.storage_offset());
      const size_t num_bytes = std::min(alias.storage().nbytes(), tensor.storage().nbytes());
      if (has_moved && num_bytes) {
        copy_on_device(tensor.storage().mutable_data(), alias.storage().data(), num_bytes);
        machine_.run_current_stream();
      }
    }
  }

  void adopt_results() {
    const size_t first = stack_->size() - plan_.returned_argument.size();
    for (const auto i : c10::irange(plan_.returned_argument.size())) {
      IValue& result = (*stack_)[first + i];
      const int argument = plan_.returned_argument[i];
      if (argument >= 0 && arguments_[static_cast<size_t>(argument)].isTensor()) {
        result = arguments_[static_cast<size_t>(argument)];
      } else {
        result = replace_tensors(result, [&](const Tensor& tensor) { return adopt(tensor); });
      }
    }
  }

  // Gives a kernel's result to the device: as a view of an operand if it is one, else in a block of
  // its own.
  Tensor adopt(const Tensor& result) {
    if (!result.defined() || result.device().type() != (is_dry() ? c10::kMeta : c10::kCPU))
      return result;
    c10::StorageImpl* storage = result.storage().unsafeGetStorageImpl();
    if (const Tensor* original = aliases_.original(storage)) {
      return tensor_over(original->storage(), result, kSimKey);
    }
    for (const auto& [from, to] : adopted_) {
      if (from == storage) return tensor_over(to, result, kSimKey);
    }
    at::DataPtr block = device_allocator()->allocate(storage->nbytes());
    if (storage->nbytes() && !is_dry()) {
      copy_on_device(block.get(), storage->data(), storage->nbytes());
      if (!machine_.is_alone())
        machine_.run_current_stream();  // the host's copy dies with this call
    }
    c10::Storage ours(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(block),
                      device_allocator(), /*resizable=*/true);
    adopted_.emplace_back(storage, ours);
    return tensor_over(ours, result, kSimKey);
  }

  Machine& machine_ = Machine::get();
  c10::OperatorHandle op_;
  const Plan& plan_;
  Stack* stack_;
  Aliases aliases_;
  Arguments arguments_;
  Arguments aliased_;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> adopted_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

}  // namespace

RESIDENCY_KERNELS(_, RESIDENCY_SIM_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Composite kernels would shadow the fallback here, and allocate temporaries that CUDA does not.
// tests/sim/shadowed_operations.txt has all that could, with what becomes of each.
RESIDENCY_KERNELS(aten, RESIDENCY_SIM_KEY, library) {
  for (const char* name :
       {"convolution_overrideable", "convolution_backward_overrideable", "silu_backward",
        "mish_backward", "native_channel_shuffle", "native_layer_norm", "native_group_norm",
        "_stack", "addr", "addr.out", "any.dims", "any.dims_out", "all.dims", "all.dims_out",
        "linalg__powsum", "mse_loss", "smooth_l1_loss"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  if (!kIsCuda) return;
  // Only the *_overrideable ones are asked for on other devices; on CUDA torch looks for cuDNN.
  for (const char* name : {"convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

void override_kernels() {
  if (!kIsCuda) return;
  // Its destructor would take the kernels away again.
  auto* library = new torch::Library(torch::Library::IMPL, "aten", kSimKey, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(kSimKey)) {
    // Collectives are registered with CUDA's key in every build, and are not for the fallback.
    if (name.getNamespace() != "aten") continue;
    library->impl(c10::toString(name).c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace sim
