// The device's random numbers. As on CUDA an operation's follow from a seed and an offset, which it
// reserves when it is issued, and from nothing that was drawn before it: the state is these two
// numbers, 16 bytes. The numbers themselves are the CPU's, whose kernels draw them; at offset 0
// they are those of a CPU generator with the same seed.
#include "torch_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <mutex>

namespace sim {
namespace {

constexpr uint64_t kStep = 4;  // numbers that one thread of CUDA's draws at a time
constexpr size_t kSeedBytes = sizeof(uint64_t);
constexpr size_t kStateBytes = 2 * sizeof(uint64_t);

// Several generators can have one state (graphsafe_set_state).
struct SharedState {
  std::mutex lock;
  Draw next{c10::default_rng_seed_val, 0};
};

// How far CUDA's kernels move the offset: a number for each of a thread's elements, in fours, on
// the properties that the device claims (108 multiprocessors of 2048 threads, blocks of 256).
uint64_t advance_of(int64_t numel) {
  constexpr uint64_t kBlock = 256, kMostBlocks = 108 * 2048 / kBlock;
  if (numel <= 0) return 0;
  const auto count = static_cast<uint64_t>(numel);
  const uint64_t num_blocks = std::min((count + kBlock - 1) / kBlock, kMostBlocks);
  return ((count - 1) / (kBlock * num_blocks * kStep) + 1) * kStep;
}

uint64_t mix(uint64_t number) {  // splitmix64
  number += 0x9E3779B97F4A7C15;
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EB;
  return number ^ (number >> 31);
}

// Between captures and replays the state is a graph's: CUDA's generators neither tell nor take it.
void check_not_capturing(const char* call) {
  TORCH_CHECK(!Machine::get().is_capturing(), "Cannot call CUDAGeneratorImpl::", call,
              " during CUDA graph capture. If you need this call to be captured, please file an "
              "issue. Current cudaStreamCaptureStatus: cudaStreamCaptureStatusActive");
}

struct TorchGenerator final : c10::GeneratorImpl {
  explicit TorchGenerator(std::shared_ptr<SharedState> state = std::make_shared<SharedState>())
      : c10::GeneratorImpl(sim::device(), c10::DispatchKeySet(face().key)),
        shared(std::move(state)) {}

  Draw next() const {
    const std::lock_guard guard(shared->lock);
    return shared->next;
  }
  void set(Draw draw) {
    const std::lock_guard guard(shared->lock);
    shared->next = draw;
  }
  Draw reserve(uint64_t num_steps) {
    const std::lock_guard guard(shared->lock);
    const Draw draw = shared->next;
    shared->next.offset += num_steps;
    return draw;
  }

  void set_current_seed(uint64_t seed) override {
    if (!Machine::get().is_capturing()) return set({seed, 0});
    TORCH_CHECK(seed == next().seed,
                "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if "
                "new seed is the same as the original seed.");
  }
  uint64_t current_seed() const override {
    check_not_capturing("current_seed");
    return next().seed;
  }
  uint64_t seed() override {
    check_not_capturing("seed");
    const uint64_t random = c10::detail::getNonDeterministicRandom(/*is_cuda=*/true);
    set_current_seed(random);
    return random;
  }
  void set_offset(uint64_t offset) override {
    check_not_capturing("set_offset");
    TORCH_CHECK(offset % kStep == 0, "offset must be a multiple of 4");
    set({current_seed(), offset});
  }
  uint64_t get_offset() const override {
    check_not_capturing("get_offset");
    return next().offset;
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    check_not_capturing("current_seed");
    at::Tensor bytes = at::detail::empty_cpu({kStateBytes}, c10::kByte);
    const Draw draw = next();
    auto* data = static_cast<char*>(bytes.mutable_data_ptr());
    std::memcpy(data, &draw.seed, kSeedBytes);
    std::memcpy(data + kSeedBytes, &draw.offset, sizeof(draw.offset));
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    check_not_capturing("set_current_seed");
    at::detail::check_rng_state(state);
    const auto num_bytes = static_cast<size_t>(state.numel());
    TORCH_CHECK(num_bytes == kStateBytes || num_bytes == kSeedBytes,
                "RNG state is wrong size: found ", num_bytes, " bytes, expected ", kStateBytes,
                ", the seed and the offset of ", face().device_label,
                ". A state of 5056 bytes is of the host's generator, or of ", face().device_label,
                "'s in an earlier version of residency. Nothing was changed; seed the generator "
                "instead.");
    Draw draw;
    const auto* data = static_cast<const char*>(state.data());
    std::memcpy(&draw.seed, data, kSeedBytes);
    if (num_bytes == kStateBytes) std::memcpy(&draw.offset, data + kSeedBytes, kSeedBytes);
    TORCH_CHECK(draw.offset % kStep == 0, "offset must be a multiple of 4");
    set(draw);
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    auto* found = dynamic_cast<TorchGenerator*>(other.get());
    TORCH_CHECK(found, "expected a generator of ", face().device_label);
    shared = found->shared;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<TorchGenerator>(shared);
  }
  TorchGenerator* clone_impl() const override {
    auto copy = std::make_shared<SharedState>();
    copy->next = next();
    return new TorchGenerator(std::move(copy));
  }

  std::shared_ptr<SharedState> shared;
};

}  // namespace

at::Generator new_generator() { return at::make_generator<TorchGenerator>(); }

const at::Generator& default_generator() {
  static auto* generator = new at::Generator(new_generator());
  return *generator;
}

namespace {

TorchGenerator& own(const at::Generator& generator) {
  TORCH_CHECK(generator.defined(), "Generator with undefined implementation is not allowed");
  auto* ours = dynamic_cast<TorchGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(ours, "Expected a '", face().device, "' device type for generator but found '",
              generator.device().type(), "'");
  return *ours;
}

}  // namespace

Draw reserve(const at::Generator& generator, int64_t numel) {
  return own(generator).reserve(advance_of(numel));
}

Draw reserve_steps(const at::Generator& generator, int64_t num_steps) {
  const auto steps = static_cast<uint64_t>(num_steps);
  return own(generator).reserve((steps + kStep - 1) / kStep * kStep);
}

at::Generator numbers_at(Draw draw) {
  const uint64_t seed = draw.offset ? mix(draw.seed ^ mix(draw.offset)) : draw.seed;
  return at::detail::createCPUGenerator(seed);
}

}  // namespace sim
