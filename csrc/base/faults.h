// Faults injected at a seam to the outside: fail the k-th call of a kind, once or from then on.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/mutex.h"

namespace fencepool {

// `Call` is an enum that ends with kCount; `Result` what a call that fails returns.
template <class Call, class Result>
class Faults {
 public:
  // The `nth` call (from 1) of this kind, counted from now, returns `result` and does nothing else;
  // with `is_lasting`, so does every one after it. `call` may be Call::kCount: a call of any kind.
  void arm(Call call, std::uint64_t nth, bool is_lasting, Result result) EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    call_ = call;
    left_ = nth;
    is_lasting_ = is_lasting;
    result_ = result;
    injected_ = 0;
    armed_ = true;
  }
  void disarm() EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    armed_ = false;
  }

  // Counts the call; true when it must fail with `*result`.
  bool take(Call call, Result* result) noexcept {
    counts_[static_cast<std::size_t>(call)].fetch_add(1, std::memory_order_relaxed);
    return armed_.load(std::memory_order_relaxed) && take_armed(call, result);
  }
  std::uint64_t count(Call call) const { return counts_[static_cast<std::size_t>(call)].load(); }
  std::uint64_t injected() const { return injected_.load(); }  // faults delivered since arm()

 private:
  bool take_armed(Call call, Result* result) noexcept EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    if (!armed_ || (call_ != Call::kCount && call_ != call)) return false;
    if (left_ > 1) {
      --left_;
      return false;
    }
    *result = result_;
    ++injected_;
    if (!is_lasting_) armed_ = false;
    return true;
  }

  std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(Call::kCount)> counts_{};
  std::atomic<bool> armed_{false};
  std::atomic<std::uint64_t> injected_{0};
  Mutex mutex_;
  Call call_ GUARDED_BY(mutex_) = Call::kCount;
  std::uint64_t left_ GUARDED_BY(mutex_) = 0;  // matching calls until the fault
  bool is_lasting_ GUARDED_BY(mutex_) = false;
  Result result_ GUARDED_BY(mutex_){};
};

}  // namespace fencepool
