// Primary contexts, one a device, and each thread's stack of current contexts.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "driver/host/entry.h"
#include "driver/host/host_driver.h"

namespace fencepool::host_driver {

struct Stream;

// "All work given to `stream` up to number `sequence`". An event is a set of these.
struct Mark {
  std::shared_ptr<Stream> stream;
  std::uint64_t sequence;
  bool is_complete() const;  // REQUIRES engine().mutex
};
using Marks = std::vector<Mark>;

// A device's primary context. The four of them live until the process ends; a handle is their address.
struct Context {
  explicit Context(int device_) : device(device_) {}

  const int device;
  std::atomic<int> retains{0};                 // alive while above 0
  std::atomic<CUresult> sticky{CUDA_SUCCESS};  // the error that ended it, for every later call

  // Guarded by engine().mutex.
  std::shared_ptr<Stream> legacy_stream;         // made when first used
  std::shared_ptr<Stream> per_thread_stream;     // the same
  std::vector<std::shared_ptr<Stream>> streams;  // every stream with work, destroyed ones until they drain
  Marks awaited;                                 // what cuCtxWaitEvent was given, for streams yet to be made

  bool is_alive() const { return retains.load(std::memory_order_acquire) > 0; }
  CUresult status() const { return sticky.load(std::memory_order_acquire); }
  bool is_broken() const { return status() != CUDA_SUCCESS; }
};

// REQUIRES: is_device(device).
Context& context_at(int device);

// The context a handle names: INVALID_CONTEXT when it names none, CONTEXT_IS_DESTROYED when it was
// released, its sticky error when it has one.
CUresult find_context(CUcontext handle, Context*& found);

// The context current to this thread, under the same conditions.
CUresult require_current(Context*& found);

// The sticky error of the context current to this thread, if there is such a context and such an error.
// For calls that need no context, but that "may return errors from previous, asynchronous launches".
CUresult sticky_status();

inline CUcontext handle_of(Context& context) { return reinterpret_cast<CUcontext>(&context); }

}  // namespace fencepool::host_driver
