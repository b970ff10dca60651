#include "base/process.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

#include "base/error.h"

namespace fencepool::process {
namespace {

std::atomic<bool> is_child{false};

}  // namespace

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { is_child.store(true); }); });
}

bool is_forked_child() noexcept { return is_child.load(std::memory_order_relaxed); }

void require_owner() {
  if (is_forked_child()) {
    throw Error(Kind::kForked,
                "this process was forked from one that uses fencepool; the driver's memory belongs to the "
                "parent. Start workers with the 'spawn' or 'forkserver' method instead.");
  }
}

}  // namespace fencepool::process
