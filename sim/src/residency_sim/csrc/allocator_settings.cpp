#include "allocator_settings.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>

#include <bit>
#include <functional>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "machine.h"

namespace sim {
namespace {

using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;

constexpr size_t kMostRegisterThreads = 128;

using Check = void (*)(const std::string& name, const std::string& value);

void check_boolean(const std::string& name, const std::string& value) {
  TORCH_CHECK_VALUE(value == "True" || value == "False", "the allocator setting ", name, " is '",
                    value, "'; expected 'True' or 'False'.");
}

size_t whole_number(const std::string& name, const std::string& value) {
  const bool is_number = !value.empty() && value.size() < 19 &&
                         value.find_first_not_of("0123456789") == std::string::npos;
  TORCH_CHECK_VALUE(is_number, "the allocator setting ", name, " is '", value,
                    "'; expected a whole number.");
  return std::stoull(value);
}

void check_register_threads(const std::string& name, const std::string& value) {
  const size_t num_threads = whole_number(name, value);
  TORCH_CHECK_VALUE(std::has_single_bit(num_threads),
                    "Number of register threads has to be power of 2, got ", num_threads);
  TORCH_CHECK_VALUE(num_threads <= kMostRegisterThreads,
                    "Number of register threads should be less than or equal to ",
                    kMostRegisterThreads, ", got ", num_threads);
}

void check_reserve_segment(const std::string& name, const std::string& value) {
  TORCH_CHECK_VALUE(whole_number(name, value) > 0,
                    "Pinned reserve segment size has to be greater than 0");
}

double parse_fraction(const std::string& text) {
  size_t num_read = 0;
  double fraction = -1;
  try {
    fraction = std::stod(text, &num_read);
  } catch (const std::exception&) {
  }
  TORCH_CHECK_VALUE(num_read == text.size() && fraction >= 0 && fraction <= 1,
                    "the allocator setting per_process_memory_fraction is '", text,
                    "'; expected a number from 0 to 1.");
  return fraction;
}

void check_fraction(const std::string&, const std::string& value) { parse_fraction(value); }

void check_backend(const std::string&, const std::string& value) {
  TORCH_CHECK_VALUE(value == "native", "the allocator backend is '", value,
                    "'; the simulated accelerator has 'native' only.");
}

// Settings of CUDAAllocatorConfig, and the values that its parser takes. Those without an effect on
// bytes of the device are checked and ignored, so that a script's environment works unchanged.
const std::unordered_map<std::string, Check>& settings_of_cuda() {
  static const std::unordered_map<std::string, Check> checks{
      {"backend", check_backend},
      {"graph_capture_record_stream_reuse", check_boolean},
      {"per_process_memory_fraction", check_fraction},
      {"pinned_free_catch_all", check_boolean},
      {"pinned_num_register_threads", check_register_threads},
      {"pinned_reserve_segment_size_mb", check_reserve_segment},
      {"pinned_use_cuda_host_register", check_boolean},
      {"pinned_use_hip_host_register", check_boolean},
      {"release_lock_on_cudamalloc", check_boolean},
      {"release_lock_on_hipmalloc", check_boolean},
      {"throw_on_cudamalloc_oom", check_boolean},
  };
  return checks;
}

using Names = std::unordered_set<std::string>;

Names names_of_cuda() {
  Names names;
  for (const auto& [name, _] : settings_of_cuda()) names.insert(name);
  return names;
}

std::string known_settings() {
  std::set<std::string> sorted(Config::getKeys().begin(), Config::getKeys().end());
  std::string text;
  for (const std::string& name : sorted) text += (text.empty() ? "" : ", ") + name;
  return text;
}

using Fraction = std::optional<double>;

// Looks at every setting; returns the fraction, where there is one.
Fraction check_settings_of_cuda(const std::string& settings) {
  const c10::CachingAllocator::ConfigTokenizer tokens(settings);
  Fraction fraction;
  for (size_t i = 0; i < tokens.size(); i++) {
    const std::string& name = tokens[i];
    if (name == ",") continue;
    TORCH_CHECK_VALUE(Config::getKeys().count(name), "the allocator setting '", name,
                      "' is unknown; expected one of ", known_settings(), ".");
    TORCH_CHECK_VALUE(i + 2 < tokens.size() && tokens[i + 1] == ":", "the allocator setting '",
                      name, "' has no value; expected '", name, ":VALUE'.");
    const std::string& value = tokens[i + 2];
    const auto check = settings_of_cuda().find(name);
    if (check != settings_of_cuda().end()) check->second(name, value);
    if (name == "per_process_memory_fraction") fraction = parse_fraction(value);
    i = tokens.skipKey(i);
  }
  return fraction;
}

// As a build of torch for CUDA has it: it keeps what CUDA's allocator would read.
using Parser = std::function<void(const std::string&)>;

void parse_settings_of_cuda(const std::string& settings, const Parser& torchs_own) {
  const Fraction fraction = check_settings_of_cuda(settings);
  if (torchs_own) torchs_own(settings);
  if (!fraction) return;
  Machine::get().with_allocator(
      [&](CachingAllocator& allocator) { allocator.set_memory_fraction(*fraction); });
}

// A build of torch for CUDA has a parser already, and its names.
Parser register_parser() {
  Parser torchs_own = Config::getConfigParserHook();
  const auto parse = [torchs_own](const std::string& settings) {
    parse_settings_of_cuda(settings, torchs_own);
  };
  Config::registerDeviceConfigParserHook(parse, torchs_own ? Names{} : names_of_cuda());
  return parse;
}

// The settings that torch keeps when a later string does not name them.
struct Kept {
  size_t large_segment_bytes = Config::large_segment_size();
  size_t rounding_bytes = Config::max_non_split_rounding_size();
  bool expands = Config::use_expandable_segments();
  bool background = Config::pinned_use_background_threads();
  size_t round_threshold = pinned_max_round_threshold();
  size_t cached_bytes = pinned_max_cached_bytes();
};

std::string megabytes(size_t num_bytes) { return std::to_string(num_bytes >> 20); }

std::string boolean(bool value) { return value ? "True" : "False"; }

// Brings back what differs. Of one string torch reads the segment size first, and wants the
// rounding to be at least as large: hence three.
void go_back_to(const Kept& then) {
  const Kept now;
  auto& instance = Config::instance();
  if (now.large_segment_bytes != then.large_segment_bytes ||
      now.rounding_bytes != then.rounding_bytes) {
    const size_t least = std::min(then.large_segment_bytes, then.rounding_bytes);
    instance.parseArgs("large_segment_size_mb:" + megabytes(least));
    instance.parseArgs("max_non_split_rounding_mb:" + megabytes(then.rounding_bytes));
    instance.parseArgs("large_segment_size_mb:" + megabytes(then.large_segment_bytes));
  }
  if (now.round_threshold != then.round_threshold) {
    instance.parseArgs("pinned_max_round_threshold_mb:" + megabytes(then.round_threshold));
  }
  if (now.cached_bytes != then.cached_bytes) {
    instance.parseArgs("pinned_max_cached_size_mb:" + megabytes(then.cached_bytes));
  }
  instance.parseArgs("pinned_use_background_threads:" + boolean(then.background) +
                     ",expandable_segments:" + boolean(then.expands));
}

}  // namespace

void adopt_allocator_settings() {
  const std::string settings = c10::CachingAllocator::getAllocatorSettings();
  static const Parser parse = register_parser();
  parse(settings);
}

void set_allocator_settings(const std::string& settings) {
  const Kept then;
  const std::string previous = c10::CachingAllocator::getAllocatorSettings();
  try {
    c10::CachingAllocator::setAllocatorSettings(settings);
  } catch (...) {
    go_back_to(then);
    Config::instance().parseArgs(previous);  // for the settings that every string sets anew
    throw;
  }
}

}  // namespace sim
