// A gate that holds streams until the host opens it: how tests prove an order without sleeping.
#pragma once

#include <cuda.h>

#include "base/mutex.h"

namespace fencepool {

// Thread-safe. Its host function touches nothing of Python. The gate itself is never freed: a stream may
// reach it after the latch is gone (it opens then), and a captured graph any number of times.
class Latch {
 public:
  Latch() : gate_(new Gate()) {}
  ~Latch() { open(); }
  Latch(const Latch&) = delete;
  Latch& operator=(const Latch&) = delete;

  // Lets every stream pass, now and later.
  void open() {
    const Lock lock(gate_->mutex);
    gate_->is_open = true;
    gate_->changed.notify_all();
  }

  // Streams that stand at the gate now.
  int waiting() const {
    const Lock lock(gate_->mutex);
    return gate_->waiting;
  }
  // Passages through the gate so far.
  int passed() const {
    const Lock lock(gate_->mutex);
    return gate_->passed;
  }

  // Waits until `count` streams stand at the gate.
  void wait_until_held(int count) {
    const Lock lock(gate_->mutex);
    while (gate_->waiting < count) gate_->changed.wait(gate_->mutex);
  }

  // For cuLaunchHostFunc.
  static void CUDA_CB hold(void* gate) { static_cast<Gate*>(gate)->pass(); }
  void* gate() const { return gate_; }

 private:
  struct Gate {
    void pass() {
      const Lock lock(mutex);
      ++waiting;
      changed.notify_all();
      while (!is_open) changed.wait(mutex);
      --waiting;
      ++passed;
      changed.notify_all();
    }
    Mutex mutex;
    Condition changed;
    bool is_open GUARDED_BY(mutex) = false;
    int waiting GUARDED_BY(mutex) = 0;
    int passed GUARDED_BY(mutex) = 0;
  };
  Gate* gate_;
};

}  // namespace fencepool
