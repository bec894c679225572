#include "torch_readings.h"

#include <ATen/core/function_schema.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "torch_numbers.h"
#include "torch_values.h"

namespace sim {
namespace {

using at::Tensor;

constexpr size_t kMostKnownBytes = size_t(4) << 20;  // the pickles that ranks gather
constexpr size_t kMostKnownFractions = size_t(64) << 10;
constexpr int64_t kMostComputed = 1024;  // elements of what is computed from what is known
constexpr size_t kMostListed = 64;
constexpr int64_t kMostDrawn = int64_t(1) << 16;
constexpr int64_t kMostDrawnFractions = 16;  // more are weights

// ----------------------------------------------------------------------------------------- bytes

// The bytes of a storage that were copied from the host.
class Known {
 public:
  void write(size_t begin, const void* bytes, size_t num_bytes) {
    const size_t end = begin + num_bytes;
    if (bytes_.size() < end) {
      bytes_.resize(end);
      is_known_.resize(end, false);
    }
    std::memcpy(bytes_.data() + begin, bytes, num_bytes);
    std::fill(is_known_.begin() + begin, is_known_.begin() + end, true);
  }

  const char* read(size_t begin, size_t num_bytes) const {
    const size_t end = begin + num_bytes;
    if (bytes_.size() < end) return nullptr;
    const auto last = is_known_.begin() + end;
    return std::find(is_known_.begin() + begin, last, false) == last ? bytes_.data() + begin
                                                                     : nullptr;
  }

 private:
  std::vector<char> bytes_;
  std::vector<bool> is_known_;
};

class Readings {
 public:
  static Readings& get() {
    static auto* readings = new Readings;  // tensors outlive static objects
    return *readings;
  }

  Noted of(const Tensor& tensor) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto found = noted_.find(tensor.storage().unsafeGetStorageImpl());
    return found == noted_.end() ? Noted{} : found->second.noted;
  }

  void note(const c10::Storage& storage, Noted noted) {
    std::lock_guard<std::mutex> guard(lock_);
    noted_.erase(storage.unsafeGetStorageImpl());
    if (noted.reading != Reading::kUnknown) entry_of(storage).noted = noted;
  }

  void write(const c10::Storage& storage, size_t begin, const void* bytes, size_t num_bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    Entry& entry = entry_of(storage);
    entry.noted = {};
    entry.known.write(begin, bytes, num_bytes);
  }

  // Copies known bytes to where `make` says; false where there are none.
  template <class Make>
  bool read(const c10::Storage& storage, size_t begin, size_t num_bytes, Make make) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto found = noted_.find(storage.unsafeGetStorageImpl());
    if (found == noted_.end()) return false;
    const char* bytes = found->second.known.read(begin, num_bytes);
    if (bytes) std::memcpy(make(), bytes, num_bytes);
    return bytes;
  }

 private:
  // A weak reference keeps the address from becoming another storage's.
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Noted noted;
    Known known;
  };

  Entry& entry_of(const c10::Storage& storage) {
    const auto found = noted_.find(storage.unsafeGetStorageImpl());
    if (found != noted_.end()) return found->second;
    if (noted_.size() >= most_) {
      std::erase_if(noted_, [](const auto& entry) { return entry.second.storage.expired(); });
      most_ = 2 * noted_.size() + 64;
    }
    return noted_.emplace(storage.unsafeGetStorageImpl(), Entry{storage.getWeakStorageImpl()})
        .first->second;
  }

  std::mutex lock_;
  std::unordered_map<const c10::StorageImpl*, Entry> noted_;
  size_t most_ = 64;
};

size_t first_byte(const Tensor& tensor) { return tensor.storage_offset() * tensor.itemsize(); }

// A tensor whose bytes are known, on the host and contiguous.
std::optional<Tensor> known_bytes(const Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0 || tensor.is_conj() || tensor.is_neg()) {
    return std::nullopt;
  }
  int64_t length = 1;
  for (const auto dim : c10::irange(tensor.dim())) {
    length += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  Tensor host;
  auto make = [&] {
    as_device_work([&] { host = at::empty({length}, tensor.options().device(c10::kCPU)); });
    return host.mutable_data_ptr();
  };
  const size_t num_bytes = length * tensor.itemsize();
  if (num_bytes > kMostKnownBytes) return std::nullopt;
  if (!Readings::get().read(tensor.storage(), first_byte(tensor), num_bytes, make)) {
    return std::nullopt;
  }
  as_device_work([&] { host = host.as_strided(tensor.sizes(), tensor.strides()).contiguous(); });
  return host;
}

// `value` is on the host, of the sizes of `to`.
void note_value(const Tensor& value, const Tensor& to) {
  const bool is_whole = c10::isIntegralType(to.scalar_type(), /*includeBool=*/true);
  const size_t most = is_whole ? kMostKnownBytes : kMostKnownFractions;
  const bool is_small = first_byte(to) + to.nbytes() <= most;
  if (!is_small || !to.is_contiguous() || to.is_conj() || to.is_neg()) {
    return note_reading(to.storage(), {});
  }
  Tensor cast = value;
  as_device_work([&] { cast = value.to(to.scalar_type()).contiguous(); });
  Readings::get().write(to.storage(), first_byte(to), cast.const_data_ptr(), to.nbytes());
}

// ------------------------------------------------------------------------------------ operations

struct Number {
  double value;
  bool is_certain;
};

// What a tensor is compared as, of one element or of nothing but zeros.
std::optional<Number> number_of(const Tensor& tensor) {
  const bool is_number = tensor.defined() && tensor.numel() > 0 && !tensor.is_complex();
  if (!is_number || tensor.scalar_type() == at::kBool) return std::nullopt;
  if (is_sim(tensor) && dry_reading(tensor) == Reading::kZero) return Number{0.0, true};
  if (tensor.numel() > 1 || (!tensor.is_cpu() && !is_sim(tensor))) return std::nullopt;
  if (tensor.is_cpu()) return Number{tensor.item<double>(), true};
  if (const auto known = known_value(tensor)) return Number{known->item<double>(), true};
  return Number{is_sim(tensor) ? dry_number(tensor) : 1.0, false};
}

std::optional<Number> number_of(const c10::IValue& value) {
  if (value.isTensor()) return number_of(value.toTensor());
  if (!value.isScalar() || value.isComplexDouble()) return std::nullopt;
  return Number{value.toScalar().toDouble(), true};
}

std::optional<bool> compare(const std::string& operation, double a, double b) {
  if (operation == "aten::eq") return a == b;
  if (operation == "aten::ne") return a != b;
  if (operation == "aten::lt") return a < b;
  if (operation == "aten::le") return a <= b;
  if (operation == "aten::gt") return a > b;
  if (operation == "aten::ge") return a >= b;
  return std::nullopt;
}

bool is_same(const c10::IValue& value, const Tensor& tensor) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const Tensor& other = value.toTensor();
  return other.is_alias_of(tensor) && other.storage_offset() == tensor.storage_offset() &&
         other.sizes() == tensor.sizes() && other.strides() == tensor.strides();
}

// No element is exactly zero, infinite, or not a number.
Reading comparison(const std::string& operation, const c10::IValue& a, const c10::IValue& b) {
  const auto left = number_of(a);
  const auto right = number_of(b);
  const bool holds = left && right && *compare(operation, left->value, right->value);
  const int num_certain = (left && left->is_certain) + (right && right->is_certain);
  if (left && right && num_certain == 2) return holds ? Reading::kTrue : Reading::kZero;
  const bool is_infinite = is_scalar(b, std::numeric_limits<double>::infinity());
  const bool is_itself = is_same(b, a.toTensor());
  if (operation == "aten::eq" && (is_scalar(b, 0.0) || is_infinite)) return Reading::kZero;
  if (operation == "aten::eq" && is_itself) return Reading::kTrue;
  if (operation == "aten::ne" && is_infinite) return Reading::kTrue;
  if (operation == "aten::ne" && is_itself) return Reading::kZero;
  return holds && num_certain == 1 ? Reading::kHolds : Reading::kUnknown;
}

bool is_truth(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         value.toTensor().scalar_type() == at::kBool;
}

Reading combination(const std::string& operation, const c10::IValue& a, const c10::IValue& b) {
  const bool is_and = operation == "aten::logical_and" || operation == "aten::bitwise_and";
  const bool is_or = operation == "aten::logical_or" || operation == "aten::bitwise_or";
  const bool are_truths = is_truth(a) && is_truth(b);
  if (!a.isTensor() || !b.isTensor() || (!are_truths && !is_and)) return Reading::kUnknown;
  const Reading left = dry_reading(a.toTensor());
  const Reading right = dry_reading(b.toTensor());
  const Reading decisive = is_or ? Reading::kTrue : Reading::kZero;
  if (left == decisive || right == decisive) return decisive;
  if (!are_truths) return Reading::kUnknown;
  if (left == Reading::kZero && right == Reading::kZero) return Reading::kZero;
  auto holds = [](Reading reading) {
    return reading == Reading::kTrue || reading == Reading::kHolds || reading == Reading::kAll;
  };
  const bool both = holds(left) && holds(right);
  const bool result = is_or ? holds(left) || holds(right) : both;
  if (!result) return Reading::kUnknown;
  return left == right ? left : Reading::kHolds;
}

Reading negation(Reading reading) {
  if (reading == Reading::kZero) return Reading::kTrue;
  const bool is_true = reading == Reading::kTrue || reading == Reading::kAll;
  return is_true ? Reading::kZero : Reading::kUnknown;
}

Reading reading_after(const std::string& name, const Arguments& arguments) {
  const std::string operation = name.substr(0, name.find('.'));
  auto input = [&] { return dry_reading(arguments[0].toTensor()); };
  if (name == "aten::_amp_foreach_non_finite_check_and_unscale_") return Reading::kZero;
  if (compare(operation, 0, 0)) return comparison(operation, arguments[0], arguments[1]);
  if (operation == "aten::isnan" || operation == "aten::isinf") return Reading::kZero;
  if (operation == "aten::remainder" || operation == "aten::fmod") {
    // Of whole numbers, which `x % 1 == 0` asks for, nothing remains.
    const auto divisor = number_of(arguments[1]);
    const bool is_one = divisor && divisor->is_certain && std::abs(divisor->value) == 1;
    return is_one ? Reading::kZero : Reading::kUnknown;
  }
  if (operation == "aten::logical_not" || operation == "aten::bitwise_not") {
    return is_truth(arguments[0]) ? negation(input()) : Reading::kUnknown;
  }
  if (operation == "aten::mul" || operation == "aten::logical_and" ||
      operation == "aten::logical_or" || operation == "aten::bitwise_and" ||
      operation == "aten::bitwise_or") {
    return combination(operation, arguments[0], arguments[1]);
  }
  if (operation == "aten::all") {
    const Reading reading = input();
    return reading == Reading::kZero || reading == Reading::kTrue ? reading : Reading::kAll;
  }
  if (operation == "aten::any" && input() == Reading::kTrue) return Reading::kTrue;
  if (operation == "aten::sum" || operation == "aten::any" || operation == "aten::count_nonzero" ||
      name == "aten::max" || name == "aten::min") {
    return input() == Reading::kZero ? Reading::kZero : Reading::kUnknown;
  }
  return Reading::kUnknown;
}

Noted noted_after(const std::string& name, const Arguments& arguments) {
  const Reading reading = reading_after(name, arguments);
  const auto number = reading == Reading::kUnknown ? number_after(name, arguments) : std::nullopt;
  if (!number || !std::isfinite(*number)) return {reading};
  return {Reading::kNumber, *number};
}

}  // namespace

std::optional<Tensor> known_value(const Tensor& tensor) {
  if (auto known = known_bytes(tensor)) return known;
  if (!tensor.has_storage() || tensor.numel() > kMostComputed) return std::nullopt;
  const Reading reading = Readings::get().of(tensor).reading;
  if (reading != Reading::kZero && reading != Reading::kTrue) return std::nullopt;
  Tensor host;
  const auto options = tensor.options().device(c10::kCPU);
  as_device_work([&] { host = at::full(tensor.sizes(), reading == Reading::kTrue, options); });
  return host;
}

Reading dry_reading(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return Reading::kUnknown;
  const Reading noted = Readings::get().of(tensor).reading;
  if (noted != Reading::kUnknown || tensor.numel() > kMostComputed) return noted;
  const auto known = known_bytes(tensor);
  if (!known) return noted;
  Reading reading = Reading::kUnknown;
  as_device_work([&] {
    if (!known->any().item<bool>()) {
      reading = Reading::kZero;
    } else if (known->scalar_type() == at::kBool && known->all().item<bool>()) {
      reading = Reading::kTrue;
    }
  });
  return reading;
}

void note_reading(const c10::Storage& storage, Noted noted) {
  Readings::get().note(storage, noted);
}

double dry_number(const Tensor& tensor) {
  return tensor.has_storage() ? Readings::get().of(tensor).number : 1;
}

Noted note_written(const Plan& plan, const Arguments& arguments) {
  const Noted noted = noted_after(plan.name, arguments);
  for (const auto i : c10::irange(arguments.size())) {
    if (!plan.arguments[i].writes) continue;
    visit_tensors(arguments[i], [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      note_reading(tensor.storage(), arguments[i].isTensor() ? noted : Noted{});
    });
  }
  return noted;
}

namespace {

// What is known of counts is that they sum to what was counted: they are taken as equal, and what
// does not divide goes to the first.
std::optional<Computed> compute_counts(const std::string& name, const Arguments& arguments) {
  const bool is_bincount = name == "aten::bincount";
  if (!is_bincount && name != "aten::histc") return std::nullopt;
  const auto is_given = [](const c10::IValue& v) { return v.isTensor() && v.toTensor().defined(); };
  if (is_bincount && is_given(arguments[1])) return std::nullopt;  // weights
  const Tensor& counted = arguments[0].toTensor();
  const int64_t num_places = std::max<int64_t>(1, arguments[is_bincount ? 2 : 1].toInt());
  if (num_places > kMostComputed || !is_sim(counted)) return std::nullopt;
  const auto type = is_bincount ? at::kLong : counted.scalar_type();
  Tensor counts;
  as_device_work([&] {
    counts = at::full({num_places}, counted.numel() / num_places, at::TensorOptions(type));
    counts[0] += counted.numel() % num_places;
  });
  tell_of_guess("counts", counted.numel());
  return Computed{arguments, {}, {counts}};
}

// Few numbers that are drawn, as a program reads them: sizes, an order, what a branch goes by.
bool is_small_draw(const c10::FunctionSchema& schema, const Arguments& arguments) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::bernoulli_", "aten::exponential_", "aten::normal_", "aten::random_", "aten::uniform_"};
  if (schema.name() == "aten::randperm") {
    return schema.overload_name() == "generator_out" && arguments[0].toInt() <= kMostDrawn;
  }
  if (!names->contains(schema.name()) || !arguments[0].isTensor()) return false;
  const Tensor& drawn = arguments[0].toTensor();
  const bool is_whole = c10::isIntegralType(drawn.scalar_type(), /*includeBool=*/true);
  return drawn.numel() <= (is_whole ? kMostDrawn : kMostDrawnFractions);
}

// Only what is small, repeats, and looks at nothing but what is known: the counters and flags of a
// program, which end its loops.
std::optional<Computed> compute_from_known(const c10::OperatorHandle& op,
                                           const Arguments& arguments, const Numbers& numbers) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  const bool is_draw = op.hasTag(at::Tag::nondeterministic_seeded);
  if (is_draw && (!numbers || !is_small_draw(schema, arguments))) return std::nullopt;
  const bool overwrites = is_draw || name == "aten::fill_" || name == "aten::zero_";
  // Sizes that hang on values, and whether two inputs are the same, are worth more work.
  const bool makes_sizes = op.hasTag(at::Tag::dynamic_output_shape) || name == "aten::equal";
  const auto most = makes_sizes ? static_cast<int64_t>(kMostKnownBytes)
                    : is_draw   ? kMostDrawn
                                : kMostComputed;
  bool is_known = true;
  Computed computed;
  for (const auto i : c10::irange(arguments.size())) {
    const c10::Argument& argument = schema.arguments()[i];
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    const bool is_viewed = argument.alias_info() && !writes;
    if (writes) computed.written.push_back(i);
    const bool is_overwritten = argument.is_out() || (overwrites && writes);
    auto host_of = [&](const Tensor& tensor) -> Tensor {
      if (!is_known || !tensor.defined() || (tensor.is_cpu() && !writes)) return tensor;
      is_known = is_sim(tensor) && tensor.numel() <= most && !is_viewed;
      if (!is_known) return tensor;
      Tensor empty;
      if (is_overwritten) {
        const auto options = tensor.options().device(c10::kCPU);
        as_device_work([&] { empty = at::empty(tensor.sizes(), options); });
        return empty;
      }
      const auto known = known_value(tensor);
      is_known = known.has_value();
      return known.value_or(tensor);
    };
    const bool is_list = arguments[i].isTensorList() || arguments[i].isOptionalTensorList();
    if (is_list && (writes || arguments[i].toListRef().size() > kMostListed)) return std::nullopt;
    const bool is_device = arguments[i].isDevice();
    if (is_draw && argument.name() == "generator") {
      computed.arguments.emplace_back(numbers(arguments[i]));
      continue;
    }
    computed.arguments.push_back(is_device ? c10::IValue(c10::Device(c10::kCPU))
                                           : replace_tensors(arguments[i], host_of));
    if (!is_known) return std::nullopt;
  }
  try {
    as_device_work([&] {
      computed.results.assign(computed.arguments.begin(), computed.arguments.end());
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &computed.results);
    });
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  if (is_draw && most_elements(arguments) == 1) tell_of_guess("drawn", 1);
  return computed;
}

}  // namespace

std::optional<Computed> compute_known(const c10::OperatorHandle& op, const Arguments& arguments,
                                      const Numbers& numbers) {
  if (auto computed = compute_from_known(op, arguments, numbers)) return computed;
  return compute_counts(op.schema().name(), arguments);
}

void note_computed(const Computed& computed, const Arguments& arguments,
                   const torch::jit::Stack& stack) {
  auto note = [](const c10::IValue& value, const c10::IValue& device) {
    if (!value.isTensor() || !device.isTensor() || !is_sim(device.toTensor())) return;
    const Tensor& from = value.toTensor();
    const Tensor& to = device.toTensor();
    if (from.is_cpu() && to.numel() > 0 && from.sizes() == to.sizes()) note_value(from, to);
  };
  for (const size_t i : computed.written) note(computed.arguments[i], arguments[i]);
  const size_t first = stack.size() - computed.results.size();
  for (const auto i : c10::irange(computed.results.size())) {
    note(computed.results[i], stack[first + i]);
  }
}

void note_copy(const Tensor& from, const Tensor& to) {
  if (from.is_cpu()) {
    Tensor host;
    const bool is_small = from.nbytes() <= kMostKnownBytes;
    if (is_small) as_device_work([&] { host = from.contiguous(); });
    return is_small ? note_value(host, to) : note_reading(to.storage(), {});
  }
  if (const auto known = known_value(from)) return note_value(*known, to);
  const bool is_number = dry_reading(from) == Reading::kNumber;
  note_reading(to.storage(), is_number ? Noted{Reading::kNumber, dry_number(from)} : Noted{});
}

// Of its peers a rank knows nothing: what it gathers from each is taken to be what it gives.
void note_collective(const std::vector<Tensor>& reads, const std::vector<Tensor>& writes) {
  if (reads.size() == writes.size() &&
      std::equal(reads.begin(), reads.end(), writes.begin(),
                 [](const Tensor& a, const Tensor& b) { return a.is_same(b); })) {
    return;
  }
  std::optional<Tensor> known;
  if (reads.size() == 1) known = known_value(reads[0]);
  for (const Tensor& written : writes) {
    const bool has_parts = known && written.scalar_type() == known->scalar_type() &&
                           written.is_contiguous() && written.numel() % known->numel() == 0;
    if (!has_parts) {
      note_reading(written.storage(), {});
      continue;
    }
    Tensor value;
    as_device_work([&] {
      value = known->reshape({-1}).repeat({written.numel() / known->numel()});
      value = value.reshape(written.sizes());
    });
    note_value(value, written);
  }
}

}  // namespace sim
