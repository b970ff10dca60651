// Seconds on the steady clock, and a stopwatch for phases.
#pragma once

#include <chrono>

namespace fencepool {

inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Stopwatch {
 public:
  // Seconds since construction or the last lap.
  double lap() {
    const double now = now_seconds();
    const double passed = now - last_;
    last_ = now;
    return passed;
  }
  double total() const { return now_seconds() - start_; }

 private:
  double start_ = now_seconds();
  double last_ = start_;
};

}  // namespace fencepool
