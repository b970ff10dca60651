// Trying again until a deadline, with naps between that grow.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "base/interrupt.h"

namespace fencepool {

class Naps {
 public:
  // `seconds` from now on.
  explicit Naps(double seconds) : deadline_(now_seconds() + seconds) {}

  bool is_over() const { return now_seconds() >= deadline_; }
  // Sleeps for a while, though not beyond the deadline.
  void take(const Interrupt& interrupt) {
    if (interrupt) interrupt();
    const std::chrono::duration<double> left(std::max(deadline_ - now_seconds(), 0.0));
    std::this_thread::sleep_for(std::min(left, std::chrono::duration<double>(next_)));
    next_ = std::min(next_ * 2, std::chrono::milliseconds(50));
  }

 private:
  double deadline_;
  std::chrono::milliseconds next_{1};
};

}  // namespace fencepool
