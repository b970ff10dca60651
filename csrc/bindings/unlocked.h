// Letting go of the GIL around a call that may wait.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include "base/allocation_faults.h"

namespace fencepool {

inline bool is_python_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Like pybind11's gil_scoped_release, except when the interpreter is ending: before 3.14 Python then ends
// a thread that asks for the GIL, or waits for it already, by unwinding its stack, which C++ answers by
// ending the process. Such a thread is held here instead, until the process is gone.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    if (is_python_ending() && !is_main_thread()) hold();
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {  // pthread_exit; it goes no further than here
      hold();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  static bool is_main_thread() { return gettid() == getpid(); }
  [[noreturn]] static void hold() {
    while (true) pause();
  }

 private:
  PyThreadState* state_;
  allocation_faults::Inside inside_;
};

}  // namespace fencepool
