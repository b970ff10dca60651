// Faults injected at the driver table: fail the k-th call of a kind, once or from then on.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/mutex.h"
#include "driver/table.h"

namespace fencepool::driver {

class Faults {
 public:
  // The `nth` call (from 1) of this kind, counted from now, returns `result` and does nothing else;
  // with `is_lasting`, so does every one after it. `call` may be Call::kCount: a call of any kind.
  void arm(Call call, std::uint64_t nth, bool is_lasting, CUresult result) EXCLUDES(mutex_);
  void disarm() EXCLUDES(mutex_);

  // Counts the call; true when it must fail with `*result`.
  bool take(Call call, CUresult* result) noexcept {
    counts_[static_cast<std::size_t>(call)].fetch_add(1, std::memory_order_relaxed);
    return armed_.load(std::memory_order_relaxed) && take_armed(call, result);
  }
  std::uint64_t count(Call call) const { return counts_[static_cast<std::size_t>(call)].load(); }
  std::uint64_t injected() const { return injected_.load(); }  // faults delivered since arm()

 private:
  bool take_armed(Call call, CUresult* result) noexcept EXCLUDES(mutex_);

  std::array<std::atomic<std::uint64_t>, kCallCount> counts_{};
  std::atomic<bool> armed_{false};
  std::atomic<std::uint64_t> injected_{0};
  Mutex mutex_;
  Call call_ GUARDED_BY(mutex_) = Call::kCount;
  std::uint64_t left_ GUARDED_BY(mutex_) = 0;  // matching calls until the fault
  bool is_lasting_ GUARDED_BY(mutex_) = false;
  CUresult result_ GUARDED_BY(mutex_) = CUDA_SUCCESS;
};

}  // namespace fencepool::driver
