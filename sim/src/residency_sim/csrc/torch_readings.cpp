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
constexpr size_t kMostKept = size_t(256) << 20;  // of all tensors together

// ----------------------------------------------------------------------------------------- bytes

// The bytes of a storage that were copied from the host.
class Known {
 public:
  void write(size_t begin, const void* bytes, size_t num_bytes) {
    const size_t end = begin + num_bytes;
    if (bytes_.size() < end) {
      bytes_.resize(end);
      is_known_.resize(end, 0);
    }
    std::memcpy(bytes_.data() + begin, bytes, num_bytes);
    std::memset(is_known_.data() + begin, 1, num_bytes);
  }

  size_t num_bytes() const { return bytes_.size(); }

  const char* read(size_t begin, size_t num_bytes) const {
    const size_t end = begin + num_bytes;
    if (bytes_.size() < end) return nullptr;
    return std::memchr(is_known_.data() + begin, 0, num_bytes) ? nullptr : bytes_.data() + begin;
  }

 private:
  std::vector<char> bytes_;
  std::vector<char> is_known_;
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
    const auto found = noted_.find(storage.unsafeGetStorageImpl());
    if (found != noted_.end()) forget(found);
    if (noted.reading != Reading::kUnknown) entry_of(storage).noted = noted;
  }

  void write(const c10::Storage& storage, size_t begin, const void* bytes, size_t num_bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    if (kept_ + begin + num_bytes > kMostKept) forget_the_dead();
    Entry& entry = entry_of(storage);
    entry.noted = {};
    kept_ -= entry.known.num_bytes();
    if (kept_ + begin + num_bytes > kMostKept) {
      entry.known = {};
    } else {
      entry.known.write(begin, bytes, num_bytes);
      kept_ += entry.known.num_bytes();
    }
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

  using Entries = std::unordered_map<const c10::StorageImpl*, Entry>;

  Entries::iterator forget(Entries::iterator entry) {
    kept_ -= entry->second.known.num_bytes();
    return noted_.erase(entry);
  }

  void forget_the_dead() {
    for (auto entry = noted_.begin(); entry != noted_.end();) {
      entry = entry->second.storage.expired() ? forget(entry) : std::next(entry);
    }
    most_ = 2 * noted_.size() + 64;
  }

  Entry& entry_of(const c10::Storage& storage) {
    const auto found = noted_.find(storage.unsafeGetStorageImpl());
    if (found != noted_.end()) return found->second;
    if (noted_.size() >= most_) forget_the_dead();
    return noted_.emplace(storage.unsafeGetStorageImpl(), Entry{storage.getWeakStorageImpl()})
        .first->second;
  }

  std::mutex lock_;
  Entries noted_;
  size_t most_ = 64;
  size_t kept_ = 0;  // bytes that are known
};

size_t first_byte(const Tensor& tensor) { return tensor.storage_offset() * tensor.itemsize(); }

// The elements of a storage from a tensor's first to its last.
int64_t extent(const Tensor& tensor) {
  int64_t length = 1;
  for (const auto dim : c10::irange(tensor.dim())) {
    length += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return length;
}

// These, on the host, where their bytes are known.
std::optional<Tensor> known_extent(const Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0 || tensor.is_conj() || tensor.is_neg()) {
    return std::nullopt;
  }
  const int64_t length = extent(tensor);
  Tensor host;
  auto make = [&] {
    as_device_work([&] { host = at::empty({length}, tensor.options().device(c10::kCPU)); });
    return host.mutable_data_ptr();
  };
  const size_t num_bytes = length * tensor.itemsize();
  if (num_bytes > kMostKnownBytes) return std::nullopt;
  const bool is_known = Readings::get().read(tensor.storage(), first_byte(tensor), num_bytes, make);
  return is_known ? std::optional(host) : std::nullopt;
}

// A tensor whose bytes are known, on the host and in its own layout, by which kernels order their
// sums. All bytes of one without elements are known.
std::optional<Tensor> known_bytes(const Tensor& tensor) {
  std::optional<Tensor> host;
  if (tensor.has_storage() && tensor.numel() == 0) {
    as_device_work([&] { host = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)); });
    return host;
  }
  host = known_extent(tensor);
  if (!host) return host;
  as_device_work([&] { *host = host->as_strided(tensor.sizes(), tensor.strides()); });
  return host;
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

// Whether a certain reading rests on none of some whole numbers being 0, or on another that does.
bool rests_on_guess(const std::string& name, const Arguments& arguments) {
  if (name.starts_with("aten::eq.") && is_scalar(arguments[1], 0.0)) {
    const Tensor& input = arguments[0].toTensor();
    const auto number = number_of(input);
    const bool is_known = number && number->is_certain;
    if (c10::isIntegralType(input.scalar_type(), /*includeBool=*/false) && !is_known) return true;
  }
  bool found = false;
  for (const c10::IValue& value : arguments) {
    visit_tensors(value, [&](const Tensor& tensor) {
      found |= tensor.defined() && tensor.has_storage() && Readings::get().of(tensor).is_guess;
    });
  }
  return found;
}

Noted noted_after(const std::string& name, const Arguments& arguments) {
  const Reading reading = reading_after(name, arguments);
  if (reading != Reading::kUnknown) {
    return {.reading = reading, .is_guess = rests_on_guess(name, arguments)};
  }
  const auto number = number_after(name, arguments);
  if (!number || !std::isfinite(*number)) return {};
  return {.reading = Reading::kNumber, .number = *number};
}

}  // namespace

size_t most_known(const Tensor& tensor) {
  const bool is_whole = c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
  return is_whole ? kMostKnownBytes : kMostKnownFractions;
}

std::optional<Tensor> known_value(const Tensor& tensor) {
  if (auto known = known_bytes(tensor)) return known;
  if (!tensor.has_storage() || tensor.numel() > kMostComputedFractions) return std::nullopt;
  const auto [reading, number, is_guess] = Readings::get().of(tensor);
  const bool is_certain = reading == Reading::kZero || reading == Reading::kTrue;
  if (!is_certain || is_guess) return std::nullopt;
  Tensor host;
  const auto options = tensor.options().device(c10::kCPU);
  as_device_work([&] { host = at::full(tensor.sizes(), reading == Reading::kTrue, options); });
  return host;
}

void note_value(const Tensor& value, const Tensor& to) {
  if (to.numel() == 0) return;
  const bool is_small = first_byte(to) + extent(to) * to.itemsize() <= most_known(to);
  // Between the elements that are written others may lie, which stay what they are.
  const bool is_dense = to.is_non_overlapping_and_dense();
  std::optional<Tensor> host;
  if (is_small && !is_dense) host = known_extent(to);
  if (!is_small || (!is_dense && !host) || to.is_conj() || to.is_neg()) {
    return note_reading(to.storage(), {});
  }
  as_device_work([&] {
    if (!host) host = at::empty({extent(to)}, to.options().device(c10::kCPU));
    host->as_strided(to.sizes(), to.strides()).copy_(value);
  });
  Readings::get().write(to.storage(), first_byte(to), host->const_data_ptr(), host->nbytes());
}

Reading dry_reading(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return Reading::kUnknown;
  const Reading noted = Readings::get().of(tensor).reading;
  const bool is_small = tensor.numel() > 0 && tensor.numel() <= kMostComputedFractions;
  if (noted != Reading::kUnknown || !is_small) return noted;
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

bool is_guess(const Tensor& tensor) {
  return tensor.has_storage() && Readings::get().of(tensor).is_guess;
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
