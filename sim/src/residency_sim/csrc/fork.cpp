#include "fork.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>

#include "face.h"

namespace sim {
namespace {

std::atomic<bool> is_used{false};
std::atomic<bool> is_forked_in_use{false};

[[maybe_unused]] const int at_fork =
    pthread_atfork(nullptr, nullptr, [] { is_forked_in_use = is_used.load(); });

}  // namespace

void poison_fork() { is_used = true; }

bool is_in_bad_fork() { return is_forked_in_use.load(std::memory_order_relaxed); }

void use_device() {
  TORCH_CHECK(!is_in_bad_fork(), "Cannot re-initialize ", face().runtime,
              " in forked subprocess. To use ", face().runtime,
              " with multiprocessing, you must use the 'spawn' start method");
  if (!is_used.load(std::memory_order_relaxed)) is_used = true;
}

}  // namespace sim
