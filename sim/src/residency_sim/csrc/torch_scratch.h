// The table of what operations take of CUDA's memory beside their results: temporaries for as long
// as a kernel holds them, and storages that stay larger than the result that lies in them. One
// entry for each operation, with the rule and its source; each kind of rule in a file of its own.
#pragma once

#include <ATen/core/function_schema.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <utility>
#include <vector>

#include "torch_device.h"
#include "workspaces.h"

namespace sim {

// One call. Its rule runs as the device's work does: below autograd and every mode.
class ScratchCall {
 public:
  using Values = c10::ArrayRef<c10::IValue>;
  ScratchCall(Values arguments, Values results, std::function<void()> make_results = {})
      : arguments(arguments), results(results), make_(std::move(make_results)) {}

  Values arguments;
  Values results;  // those of the kernel, which have shapes alone until they are made
  int dim = -1;    // which argument it is, or -1
  int keepdim = -1;

  // One of the device, or an undefined one.
  at::Tensor argument(size_t index) const;
  // The same as meta tensors: what torch's operations make of them has the shape of a temporary.
  at::Tensor shape(size_t argument) const;
  at::Tensor shape(const at::Tensor& tensor) const;
  at::Tensor result(size_t index) const;

  // Allocates the results, once: a rule calls it where the kernel does.
  void make_results() const {
    if (make_) make_();
  }

 private:
  mutable Aliases shapes_{/*dry=*/true};
  std::function<void()> make_;
};

using ChargeScratch = void (*)(const ScratchCall& call);
using CountKept = int64_t (*)(const ScratchCall& call);

// When a kernel allocates its results: before all else, that in their order or backwards, or where
// the rule says so.
enum class Results { kFirst, kBackwards, kByRule };

// Minor versions of torch 2 between which a rule was read, or held against a card's figures.
struct Versions {
  int first = 11;
  int last = 13;
};
constexpr Versions kOf11{11, 11};

struct ScratchEntry {
  const char* operation;  // its name without an overload
  ChargeScratch charge;   // or nullptr
  const char* source;     // file and function in ATen/native, or another library's
  Results results = Results::kFirst;
  Versions versions = {};
  const char* measured = "";     // the constant in it that no source has, and the card
  CountKept num_kept = nullptr;  // elements of the last result's storage
};
using ScratchEntries = std::vector<ScratchEntry>;

// Of one schema, found once.
struct ScratchRule {
  const ScratchEntry* entry = nullptr;
  int dim = -1;
  int keepdim = -1;
  bool is_out = false;  // writes into results that the caller has

  bool charges() const { return entry && entry->charge; }
  bool are_results_backwards() const { return entry && entry->results == Results::kBackwards; }
  bool keeps() const { return entry && entry->num_kept && !is_out; }
};

const ScratchEntries& scratch_table();
ScratchRule scratch_rule(const c10::FunctionSchema& schema);

// Charges the scratch of a call for as long as CUDA's kernel holds it, and makes its results.
void charge_scratch(const ScratchRule& rule, ScratchCall call);

// The same of an operation with a kernel of its own, which has made its results; the arguments are
// those that the entry's rule wants.
void charge_scratch(const char* operation, ScratchCall::Values arguments);

// Gives a result's storage, still without bytes, the size that CUDA's keeps.
void keep_storage(const ScratchRule& rule, const ScratchCall& call);

// ----------------------------------------------------------------------- what rules are made of

// A temporary of that shape.
Held hold(const at::Tensor& shape);

// A copy that a kernel makes of what it wants contiguous.
int64_t bytes_to_be_contiguous(const at::Tensor& tensor);
Held hold_contiguous(const at::Tensor& tensor);

// A reduction over `dims` (all, if none), while it runs; both are shapes or the device's.
void hold_reduction(const at::Tensor& input, const at::Tensor& result,
                    c10::OptionalIntArrayRef dims = std::nullopt, bool keeps_dims = false);

// Of cub's algorithms (cub_scratch.h) on the card.
Held hold_sort(int64_t num_keys, int64_t num_bits, int64_t key_bytes, int64_t value_bytes);
Held hold_scan(int64_t num_items, int64_t item_bytes);
Held hold_scan_by_key(int64_t num_items);
Held hold_select(int64_t num_items);
Held hold_unique_by_key(int64_t num_items, int64_t key_bytes);
Held hold_sum(int64_t num_items);

ScratchEntries scratch_of_attention();
ScratchEntries scratch_of_indexing();
ScratchEntries scratch_of_layouts();
ScratchEntries scratch_of_losses();
ScratchEntries scratch_of_norms();
ScratchEntries scratch_of_sorts();

}  // namespace sim
