// What a program reads in dry mode, where no kernel computes a value: what it has put on the device
// itself, and else placeholders.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "torch_dry.h"
#include "torch_plan.h"

namespace sim {

// [Note: readings] No kernel computes a value in dry mode, so `item()` and copies to the host give
// a placeholder: 1 for numbers, False for truth values. Torch's own code asks too, and must take
// the branch that a training step takes: nothing overflowed, nothing is zero, every check holds. A
// storage that such an answer was written to is noted, until something else is written there.
// `kHolds` is of a placeholder that was compared with a number, and compares so; `kAll` of `all()`,
// which is true; `kNumber` of one for which another number than 1 stands: shares of 1, each as
// large as the others, and what is counted in a mask, which is true everywhere. What was copied
// from the host is known, where it is small, for as long as nothing else is written there: the
// sizes and pickles that ranks send each other, counts, labels. Few numbers that are drawn are
// known, too.
//
// A program may ask until it hears something else: `while loss.item() > tolerance`, or of
// `loss.cpu()`. So who asks for placeholders at one place over and over hears the other answer once
// in a while (`kMostAnswers`): nearly 0 for a fraction, 0 for a whole number, the other truth
// value. What was noted is not doubted: a check that holds does so every time. A fraction is a
// little less each time, as a loss is that is compared with the best so far.
constexpr int64_t kMostComputedFractions = 1024;  // more are weights
size_t most_known(const at::Tensor& tensor);      // bytes

enum class Reading { kUnknown, kZero, kTrue, kHolds, kAll, kNumber };
Reading dry_reading(const at::Tensor& tensor);

struct Noted {
  Reading reading = Reading::kUnknown;
  double number = 1;      // what stands for each element of a placeholder
  bool is_guess = false;  // that none of whole numbers is 0
};

// A tensor whose values are known, or were noted where it is small: on the host.
std::optional<at::Tensor> known_value(const at::Tensor& tensor);

// Notes what a tensor of the device is from now on: a value on the host, of its sizes.
void note_value(const at::Tensor& value, const at::Tensor& to);

// Notes what the tensors that an operation wrote read as; those that it made read as the same.
Noted note_written(const Plan& plan, const Arguments& arguments);
void note_reading(const c10::Storage& storage, Noted noted);
double dry_number(const at::Tensor& tensor);
bool is_guess(const at::Tensor& tensor);

// Whether the sizes of what an operation makes hang on values: it is computed before its shapes are
// asked for.
bool makes_sizes(const c10::OperatorHandle& op);

// An operation on nothing but what is known is computed, on the host, and counts of what is not
// known are taken as equal; none, where it is neither. `numbers` gives it the generator that stands
// for one of the device's; none, where nothing is drawn now. `made` has the shapes of its results,
// where they are known.
using Numbers = std::function<at::Generator(const c10::IValue& generator)>;
std::optional<Computed> compute_known(const c10::OperatorHandle& op, const Arguments& arguments,
                                      const Numbers& numbers, const torch::jit::Stack& made);
// `stack` ends with the device's results.
void note_computed(const Computed& computed, const Arguments& arguments,
                   const torch::jit::Stack& stack);

// What a copy or a collective makes of what is known.
void note_copy(const at::Tensor& from, const at::Tensor& to);
void note_collective(const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes);

// Answers: those of a copy to the host, which leaves large tensors as they are, and of `item()`.
void read_to_host(const at::Tensor& from, const at::Tensor& to);
c10::Scalar read_scalar(const at::Tensor& tensor);
bool read_truth(Reading reading, bool is_guess = false);

// [Note: guesses] Who is shown a figure, or an error, has to know what it hangs on that no kernel
// has computed. An observer hears of it with the interpreter's lock held: a placeholder that was
// read, by what stood for it ("1", "False", ..); a "mask" that was taken as all true; values of
// which "each" was taken to differ from the others, or all to be "one"; "repeats" taken as one
// each; "counts" taken as equal; a number that was "drawn".
using GuessObserver = std::function<void(const std::string& what, int64_t numel)>;
void attach_guess_observer(GuessObserver observer);
void tell_of_guess(const char* what, int64_t numel);

// An observer that sees which code asks for a truth value, or compares a number, may answer it: a
// check holds, a loop ends. It hears what the placeholder is of ("all", "comparison", a whole
// "number", a "fraction" or ""), and the number that stands for it.
using Decider = std::function<std::optional<double>(const std::string& what, double number)>;
void attach_decider(Decider decider);

}  // namespace sim
