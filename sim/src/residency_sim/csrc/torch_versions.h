// What differs between the versions of torch that this compiles against, 2.11 and newer. Nothing
// else in these sources asks which one it is.
#pragma once

#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/headeronly/version.h>

#include <map>

// Names in c10d.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
#define RESIDENCY_PREMUL_SUM NCCLPreMulSumSupplement
#else
#define RESIDENCY_PREMUL_SUM PreMulSumSupplement
#endif
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
#define RESIDENCY_SCATTER_COALESCED COALESCED
#else
#define RESIDENCY_SCATTER_COALESCED REDUCE_SCATTER_TENSOR_COALESCED
#endif

namespace sim {

// Whether cuDNN's attention drops in sixteenths alone (pull request 174245): on an H100, torch 2.11
// takes it for any dropout, and 2.13's source does not. 2.12 was not looked at.
constexpr bool drops_in_sixteenths() { return TORCH_VERSION_MINOR >= 12; }

using PoolId = c10::MempoolId_t;
using PoolFigures = std::map<PoolId, c10::CachingAllocator::StatArray>;

// 2.13 has a place for the bytes of private pools among the figures.
template <class Stats>
constexpr bool names_private_pools() {
  return requires(Stats stats) { stats.reserved_bytes_by_private_pools; };
}

template <class Stats>
void show_private_pools(Stats& stats, const PoolFigures& pools) {
  if constexpr (names_private_pools<Stats>()) {
    for (const auto& [id, figures] : pools) stats.reserved_bytes_by_private_pools[id] = figures;
  }
}

// 2.13 bounds what is kept of pinned memory; where there is no bound, it never differs.
template <class Config = c10::CachingAllocator::AcceleratorAllocatorConfig>
size_t pinned_max_round_threshold() {
  if constexpr (requires { Config::pinned_max_round_threshold(); }) {
    return Config::pinned_max_round_threshold();
  }
  return 0;
}

template <class Config = c10::CachingAllocator::AcceleratorAllocatorConfig>
size_t pinned_max_cached_bytes() {
  if constexpr (requires { Config::pinned_max_cached_size(); }) {
    return Config::pinned_max_cached_size();
  }
  return 0;
}

}  // namespace sim
