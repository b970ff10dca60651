// A way out of a long wait.
#pragma once

#include <functional>

#include "base/mutex.h"

namespace fencepool {

// Called now and then during a wait, with no lock held; throws to end it (the bindings look for
// Python's signals). Empty where nothing may interrupt: in a deleter or an allocator callback.
using Interrupt = std::function<void()>;

// Calls `interrupt`, if there is one, with the mutex let go meanwhile; it is held again afterwards, also
// when the call throws.
inline void call_unlocked(Mutex& mutex, const Interrupt& interrupt) REQUIRES(mutex) {
  if (!interrupt) return;
  mutex.unlock();
  try {
    interrupt();
  } catch (...) {
    mutex.lock();
    throw;
  }
  mutex.lock();
}

}  // namespace fencepool
