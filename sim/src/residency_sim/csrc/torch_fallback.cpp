// Every operation that has no kernel of its own runs torch's CPU kernel on CPU aliases of the
// device's tensors: no bytes are copied, views and in-place operations work, and temporaries that
// CUDA would allocate on the device before the kernel runs (the outputs) are allocated on this one.
//
// at::native::cpu_fallback is not used: it copies every operand and cannot write through views.
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/SmallVector.h>
#include <c10/util/irange.h>

#include <mutex>
#include <unordered_map>

#include "fork.h"
#include "registration.h"
#include "torch_capture.h"
#include "torch_device.h"
#include "torch_generator.h"
#include "torch_plan.h"
#include "torch_readings.h"
#include "torch_scratch.h"
#include "torch_substitutes.h"
#include "torch_values.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr size_t kMostCheckedShapes = 10000;

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
    } else if (kernel == Plan::Kernel::kSubstitute) {
      call_substitute(op, key, arguments.data(), arguments.size(), stack);
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

// A kernel that runs after its call. A reader of what it wrote knows the layout of then.
void call_late(const c10::OperatorHandle& op, const Plan& plan, c10::DispatchKey key,
               const Arguments& arguments, const std::vector<std::pair<Tensor, Tensor>>& written,
               Stack* results) {
  call_kernel(op, plan.kernel, key, arguments, results);
  for (const auto& [alias, home] : written) {
    if (alias.storage().data() == home.storage().data() && has_layout_of(alias, home)) continue;
    as_device_work(
        [&, from = alias, to = home]() mutable { at::native::copy_(to, from.clone(), false); });
  }
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        plan_(plan_of(op)),
        stack_(stack),
        dry_(machine_.makes_shapes_only()),
        aliases_(dry_) {
    const auto first = stack->end() - static_cast<std::ptrdiff_t>(plan_.arguments.size());
    arguments_.assign(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
    stack->erase(first, stack->end());
    num_below_ = stack->size();
  }

  void run() {
    use_device();
    check_devices();
    if (plan_.scratch.charges()) {
      check_product(op_.schema(), arguments_.data(), arguments_.size());
    }
    if (plan_.is_list_kernel) check_fused_step(op_.schema(), arguments_.data());
    if (plan_.determinism) {
      check_deterministic(*plan_.determinism, op_.schema(), arguments_.data());
    }
    if (machine_.is_capturing()) check_capturable(plan_.name, arguments_);
    aliased_ = alias_arguments(aliases_);
    if (can_be_queued()) return queue();
    auto work = [&] { call_kernel(op_, plan_.kernel, aliases_.key(), aliased_, stack_); };
    if (is_dry()) {
      machine_.observe(make_launch(false));
      run_dry();  // meta kernels may be Python: no lock of ours is held around them
    } else {
      std::exception_ptr error;
      machine_.launch(make_launch(false), [&] {
        try {
          work();
        } catch (...) {
          error = std::current_exception();
        }
      });
      if (error) return fail(error);
    }
    carry_back();
    take_scratch([this] {
      adopt_results();
      if (computed_) note_computed(*computed_, arguments_, *stack_);
      if (machine_.is_capturing() && !machine_.settings().dry) capture();
    });
    if (is_dry() && plan_.note_convolution) plan_.note_convolution(arguments_, results());
  }

 private:
  bool is_dry() const { return dry_; }

  void check_devices() const {
    if (plan_.accepts_host_tensors) return check_indexed(plan_.name, arguments_[0]);
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
                face().device_label, " and cpu! (when running ", plan_.name, ")");
  }

  IValue alias_of(const IValue& value, Aliases& aliases, const Plan::Argument& argument) const {
    if (value.isTensor() && is_sim(value.toTensor())) return aliases.of(value.toTensor());
    const bool to_meta = aliases.key() == c10::DispatchKey::Meta;
    if (value.isDevice() && value.toDevice().type() == face().device) {
      place_on(value.toDevice());
      return c10::Device(to_meta ? c10::kMeta : c10::kCPU);
    }
    if (argument.is_generator && machine_.is_capturing()) return IValue();  // drawn at the replay
    if (argument.is_generator) {
      const Draw draw = draw_from(value.isNone() ? default_generator() : value.toGenerator());
      return to_meta ? IValue() : IValue(numbers_at(draw));  // many meta kernels refuse one
    }
    return replace_tensors(value, [&](const Tensor& tensor) -> Tensor {
      if (is_sim(tensor)) return aliases.of(tensor);
      return to_meta && tensor.defined() && tensor.dim() > 0 ? tensor.to(c10::kMeta) : tensor;
    });
  }

  // The numbers are taken once, however often the arguments get aliases.
  Draw draw_from(const at::Generator& generator) const {
    if (draw_) return *draw_;
    draw_ = reserve(generator, most_elements(arguments_));
    return *draw_;
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

  void run_dry() {
    Stack results;
    Numbers numbers;
    if (!machine_.is_capturing()) {
      numbers = [this](const IValue& value) {
        return numbers_at(draw_from(value.isNone() ? default_generator() : value.toGenerator()));
      };
    }
    const bool computes = machine_.settings().dry;
    const bool comes_first = makes_sizes(op_);
    if (computes && comes_first) computed_ = compute_known(op_, arguments_, numbers, {});
    const Computed* computed = computed_ ? &*computed_ : nullptr;
    sim::run_dry({plan_.name, op_.schema(), arguments_, aliased_, results, computed,
                  [this](c10::DispatchKey key, const Arguments& arguments, Stack& found) {
                    call_kernel(op_, plan_.kernel, key, arguments, &found);
                  }});
    if (plan_.scratch.keeps()) keep_storage(plan_.scratch, {aliased_, results});
    if (computes && !comes_first) computed_ = compute_known(op_, arguments_, numbers, results);
    stack_->insert(stack_->end(), results.begin(), results.end());
    if (!computed_) noted_ = note_written(plan_, arguments_);  // else in note_computed
  }

  // ------------------------------------------------------------------------------ running it later

  // A kernel can be late only where lateness shows, and if all that it writes exists already.
  // Its meta kernel makes the checks of a launch and finds the sizes of `out=` tensors; since many
  // are slow Python, a call is checked once for its shapes. The list kernels skip that: they never
  // resize.
  bool can_be_queued() { return !is_dry() && !machine_.is_alone() && can_be_late(); }

  bool can_be_late() {
    if (!plan_.may_wait) return false;
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
        return is_alias ? tensor : copy_as_read_now(tensor);
      });
    }
    std::vector<std::pair<Tensor, Tensor>> written;  // what the kernel gets, and where it belongs
    for (const auto i : c10::irange(aliased_.size())) {
      if (!plan_.arguments[i].writes || !aliased_[i].isTensor()) continue;
      const Tensor& alias = aliased_[i].toTensor();
      written.emplace_back(alias, tensor_over(alias.storage(), alias, aliases_.key()));
    }
    machine_.launch(make_launch(true),
                    [op = op_, &plan = plan_, key = aliases_.key(), aliased = std::move(aliased_),
                     written = std::move(written)] {
                      Stack results;
                      call_late(op, plan, key, aliased, written, &results);
                    });
    return_written();
    take_scratch([] {});
  }

  void capture() {
    const auto first = stack_->end() - static_cast<std::ptrdiff_t>(plan_.returned_argument.size());
    capture_call(make_launch(true),
                 {plan_,
                  arguments_,
                  {first, stack_->end()},
                  [op = op_, kernel = plan_.kernel](const Arguments& arguments, Stack* results) {
                    call_kernel(op, kernel, c10::DispatchKey::CPU, arguments, results);
                  }});
  }

  void return_written() {
    for (const int argument : plan_.returned_argument) {
      stack_->push_back(arguments_[static_cast<size_t>(argument)]);
    }
  }

  // An index out of bounds is found by the device, after the call, wherever the kernel ran.
  // [Note: failures]
  void fail(const std::exception_ptr& error) {
    stack_->resize(num_below_);
    if (!is_index_failure(error)) std::rethrow_exception(error);
    const bool is_late = can_be_late();
    const auto results = is_late ? std::nullopt : poisoned_results();
    if (!is_late && !results) std::rethrow_exception(error);
    machine_.fail(error);
    if (is_late) return return_written();
    stack_->insert(stack_->end(), results->begin(), results->end());
  }

  // What the kernel would have made, but for its bytes; nothing where the call itself is wrong.
  std::optional<Stack> poisoned_results() {
    for (const Plan::Argument& argument : plan_.arguments) {
      if (argument.writes) return std::nullopt;
    }
    Aliases shapes(/*dry=*/true);
    Stack results;
    try {
      call_kernel(op_, plan_.kernel, shapes.key(), alias_arguments(shapes), &results);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (IValue& result : results) {
      result = replace_tensors(result, [](const Tensor& shape) -> Tensor {
        if (!shape.defined()) return shape;
        return at::empty_strided(shape.sizes(), shape.strides(),
                                 shape.options().device(sim::device()));
      });
    }
    return results;
  }

  // `make_results` gives the results to the device, which may be in the middle of it.
  template <class Make>
  void take_scratch(Make make_results) {
    if (!plan_.scratch.charges()) return make_results();
    const Stack found = results().vec();
    bool are_made = false;
    charge_scratch(plan_.scratch, {arguments_, found, [&] {
                                     if (!std::exchange(are_made, true)) make_results();
                                   }});
  }

  c10::ArrayRef<IValue> results() const { return c10::ArrayRef<IValue>(*stack_).slice(num_below_); }

  // --------------------------------------------------------------------------------- its results

  // What a kernel writes it may give another layout, more bytes (a resized `out=`) or a storage of
  // its own (a result that is a view of a larger buffer): its alias is the host's then.
  void carry_back() {
    for (const auto i : c10::irange(arguments_.size())) {
      if (!plan_.arguments[i].writes || !arguments_[i].isTensor()) continue;
      const Tensor& tensor = arguments_[i].toTensor();
      if (!is_sim(tensor)) continue;
      const Tensor& alias = aliased_[i].toTensor();
      const c10::Storage storage = on_device(alias.storage());
      if (!storage.is_alias_of(tensor.storage())) {
        tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
      }
      if (!has_layout_of(tensor, alias)) take_layout_of(tensor, alias);
    }
  }

  void adopt_results() {
    const size_t num_results = plan_.returned_argument.size();
    const size_t first = stack_->size() - num_results;
    for (const auto place : c10::irange(num_results)) {
      const size_t i = plan_.scratch.are_results_backwards() ? num_results - 1 - place : place;
      IValue& result = (*stack_)[first + i];
      const int argument = plan_.returned_argument[i];
      if (argument >= 0 && arguments_[static_cast<size_t>(argument)].isTensor()) {
        result = arguments_[static_cast<size_t>(argument)];
      } else {
        result = replace_tensors(result, [&](const Tensor& tensor) { return adopt(tensor); });
      }
    }
  }

  // Gives a kernel's result to the device.
  Tensor adopt(const Tensor& result) {
    if (!result.defined() || result.device().type() != (is_dry() ? c10::kMeta : c10::kCPU))
      return result;
    Tensor made = tensor_over(on_device(result.storage()), result, face().key);
    // A decomposition of linalg's says in whole numbers that it succeeded.
    const bool is_info = c10::isIntegralType(made.scalar_type(), /*includeBool=*/false) &&
                         plan_.name.starts_with("aten::linalg_") &&
                         plan_.name.find("_ex") != std::string::npos;
    if (is_dry() && is_info) note_reading(made.storage(), {Reading::kZero});
    return made;
  }

  // The device's storage for one of a kernel's: an operand's if it is behind an alias, else one of
  // its own.
  c10::Storage on_device(const c10::Storage& host) {
    c10::StorageImpl* storage = host.unsafeGetStorageImpl();
    if (const Tensor* original = aliases_.original(storage)) {
      const c10::Storage& ours = original->storage();
      if (host.nbytes() > ours.nbytes()) resize_storage(ours, host.nbytes());
      if (!is_dry() && host.data() != ours.data()) bring(host, ours);
      return ours;
    }
    for (const auto& [from, to] : adopted_) {
      if (from == storage) return to;
    }
    const bool has_bytes = is_dry() || host.data();  // those of zeros never written have none
    at::DataPtr block(nullptr, sim::device());
    if (has_bytes) block = device_allocator()->allocate(host.nbytes());
    c10::Storage ours(c10::Storage::use_byte_size_t(), host.nbytes(), std::move(block),
                      device_allocator(), /*resizable=*/true);
    if (!is_dry()) bring(host, ours);
    adopted_.emplace_back(storage, ours);
    if (noted_.reading != Reading::kUnknown) note_reading(ours, noted_);
    return ours;
  }

  void bring(const c10::Storage& host, const c10::Storage& ours) {
    if (!host.nbytes() || !host.data()) return;
    copy_on_device(ours.mutable_data(), host.data(), host.nbytes());
    if (!machine_.is_alone()) machine_.run_current_stream();  // the host's copy dies with this call
  }

  Machine& machine_ = Machine::get();
  c10::OperatorHandle op_;
  const Plan& plan_;
  Stack* stack_;
  bool dry_;          // runs the kernel for its shapes only
  size_t num_below_;  // entries of the stack that are not this call's
  Aliases aliases_;
  Arguments arguments_;
  Arguments aliased_;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> adopted_;
  Noted noted_;                       // of what it wrote, in dry mode
  std::optional<Computed> computed_;  // what is known of what it made, in dry mode
  mutable std::optional<Draw> draw_;  // what a random operation has reserved
};

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

RESIDENCY_KERNELS(_, face().key, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Composite kernels would shadow the fallback here, and allocate temporaries that CUDA does not.
// tests/sim/shadowed_operations.txt has all that could, with what becomes of each.
RESIDENCY_KERNELS(aten, face().key, library) {
  for (const char* name :
       {"convolution_overrideable", "convolution_backward_overrideable", "silu_backward",
        "mish_backward", "native_channel_shuffle", "native_layer_norm", "native_group_norm",
        "_stack", "addr", "addr.out", "any.dims", "any.dims_out", "all.dims", "all.dims_out",
        "linalg__powsum", "mse_loss", "smooth_l1_loss", "mode.values", "index.Tensor"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  for (const char* name : {"_fused_rms_norm", "_fused_rms_norm_backward", "_foreach_norm.Scalar"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  if (!face().is_cuda) return;
  // Only the *_overrideable ones are asked for on other devices; on CUDA torch looks for cuDNN.
  for (const char* name : {"convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

void override_kernels() {
  if (!face().is_cuda) return;
  // Its destructor would take the kernels away again.
  auto* library = new torch::Library(torch::Library::IMPL, "aten", face().key, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(face().key)) {
    // Collectives are registered with CUDA's key in every build, and are not for the fallback.
    if (name.getNamespace() != "aten") continue;
    library->impl(c10::toString(name).c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace sim
