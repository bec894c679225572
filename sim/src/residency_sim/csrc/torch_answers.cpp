// Dry mode's answers to a program that reads a value, and the observer of its guesses.
#include <ATen/ops/_local_scalar_dense_native.h>
#include <Python.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "torch_readings.h"

namespace sim {
namespace {

using at::Tensor;

constexpr size_t kMostFilledBytes = size_t(1) << 20;  // a whole checkpoint must not be touched
constexpr double kNearlyZero = 1e-30;
constexpr double kProgress = 0x1p-20;  // by which a fraction is less than at the time before

// Answers of one kind at one place before another is given. A loss that is nearly 0 once breaks
// nothing; a count of 0 may be divided by, and a truth value may be of a check.
constexpr int kMostFractions = 500;
constexpr int kMostAnswers = 5000;

// How often the line of Python that runs now has asked before, modulo `most`.
int times_asked(int most) {
  static std::mutex lock;
  static auto* counts = new std::map<std::pair<const void*, int>, int>;
  if (!Py_IsInitialized()) return 0;
  pybind11::gil_scoped_acquire held;
  PyFrameObject* frame = PyEval_GetFrame();
  if (!frame) return 0;
  PyCodeObject* code = PyFrame_GetCode(frame);
  const std::pair<const void*, int> place{code, PyFrame_GetLasti(frame)};
  Py_DECREF(code);
  std::lock_guard<std::mutex> guard(lock);
  return (*counts)[place]++ % most;
}

bool has_asked_too_often(int most) { return times_asked(most) == most - 1; }

GuessObserver& guess_observer() {
  static auto* observer = new GuessObserver;  // it may outlive the interpreter
  return *observer;
}

Decider& decider() {
  static auto* decider = new Decider;  // it may outlive the interpreter
  return *decider;
}

// Of what `all()` gave a script may ask as of what is not known, although it is true.
std::optional<double> decide(Reading reading, const char* what = "", double number = 1) {
  if (!decider() || !Py_IsInitialized()) return std::nullopt;
  if (reading == Reading::kAll) what = "all";
  if (reading == Reading::kHolds) what = "comparison";
  pybind11::gil_scoped_acquire held;
  return decider()(what, number);
}

bool is_one(const Tensor& tensor, Reading reading) {
  if (reading != Reading::kUnknown) return reading != Reading::kZero;
  return tensor.scalar_type() != at::kBool;
}

bool is_certain(Reading reading) {
  return reading == Reading::kZero || reading == Reading::kTrue || reading == Reading::kAll;
}

// A fraction, in a state of a training that goes on.
double read_fraction(const Tensor& tensor) {
  const double number = dry_number(tensor);
  if (const auto decided = decide(dry_reading(tensor), "fraction", number)) {
    tell_of_guess("1", 1);
    return *decided;
  }
  const int times = times_asked(kMostFractions);
  if (times == kMostFractions - 1) {
    tell_of_guess("nearly 0", 1);
    return kNearlyZero;
  }
  const bool is_share = number > 0 && number < 1;
  tell_of_guess(is_share ? "a share of 1" : "1", 1);
  return is_share ? number : number * (1 - times * kProgress);
}

// A mask that the host has is true everywhere, as the device's is where it chooses elements.
bool is_unknown_mask(const Tensor& tensor, Reading reading) {
  return reading == Reading::kUnknown && tensor.scalar_type() == at::kBool && tensor.dim() > 0;
}

bool can_be_filled(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  const bool is_number = c10::isIntegralType(type, /*includeBool=*/true) ||
                         c10::isFloatingType(type) || c10::isComplexType(type);
  return is_number && type != c10::ScalarType::Float4_e2m1fn_x2 && !tensor.is_quantized();
}

}  // namespace

void attach_guess_observer(GuessObserver observer) { guess_observer() = std::move(observer); }

void attach_decider(Decider given) { decider() = std::move(given); }

void tell_of_guess(const char* what, int64_t numel) {
  const GuessObserver& observer = guess_observer();
  if (!observer || numel == 0 || !Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire held;
  observer(what, numel);
}

// What rests on a guess may be asked for by a check.
bool read_truth(Reading reading, bool is_guess) {
  const bool is_sure = is_certain(reading) && reading != Reading::kAll;
  if (is_sure && !is_guess) return reading == Reading::kTrue;
  if (const auto decided = decide(is_sure ? Reading::kHolds : reading)) {
    tell_of_guess(*decided != 0 ? "True" : "False", 1);
    return *decided != 0;
  }
  const bool usual = is_sure ? reading == Reading::kTrue : reading != Reading::kUnknown;
  const bool one = usual != (reading != Reading::kAll && has_asked_too_often(kMostAnswers));
  tell_of_guess(one ? "True" : "False", 1);
  return one;
}

c10::Scalar read_scalar(const Tensor& tensor) {
  if (const auto known = known_value(tensor)) return at::native::_local_scalar_dense_cpu(*known);
  const Reading reading = dry_reading(tensor);
  if (tensor.scalar_type() == at::kBool) return read_truth(reading, is_guess(tensor));
  const bool is_whole = c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
  if (is_certain(reading)) {
    const bool one = reading == Reading::kTrue;
    if (is_guess(tensor)) tell_of_guess(one ? "1" : "0", 1);
    return is_whole ? c10::Scalar(int64_t(one)) : c10::Scalar(one ? 1.0 : 0.0);
  }
  if (!is_whole) return read_fraction(tensor);
  const auto decided = decide(reading, "number", dry_number(tensor));
  const double usual = has_asked_too_often(kMostAnswers) ? 0 : dry_number(tensor);
  const auto number = static_cast<int64_t>(decided ? *decided : usual);
  tell_of_guess(number > 1 ? "mask" : number == 0 ? "0" : "1", std::max<int64_t>(number, 1));
  return number;
}

void read_to_host(const Tensor& from, const Tensor& to) {
  if (const auto known = known_value(from)) {
    return as_device_work([&] { to.copy_(*known); });
  }
  if (to.nbytes() > kMostFilledBytes || !to.is_non_overlapping_and_dense()) {
    return tell_of_guess("anything", from.numel());
  }
  if (from.numel() == 1 && from.scalar_type() != at::kBool && can_be_filled(to)) {
    const c10::Scalar value = read_scalar(from);
    return as_device_work([&] { to.fill_(value); });
  }
  const Reading reading = dry_reading(from);
  const bool one =
      is_unknown_mask(from, reading) ? !has_asked_too_often(kMostAnswers) : is_one(from, reading);
  const double number = one ? dry_number(from) : 0;
  const bool is_whole = c10::isIntegralType(from.scalar_type(), /*includeBool=*/true);
  const char* stands = number > 1 && is_whole     ? "mask"
                       : number > 0 && number < 1 ? "a share of 1"
                       : number == 0              ? "0"
                                                  : "1";
  if (!is_certain(reading) || is_guess(from)) tell_of_guess(stands, from.numel());
  if (one && can_be_filled(to)) {
    as_device_work([&] { to.fill_(number); });
  } else {
    std::memset(to.mutable_data_ptr(), 0, to.nbytes());
  }
}

}  // namespace sim
