#include "driver/host/streams.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "driver/host/captures.h"

namespace fencepool::host_driver {
namespace {

void break_context(Context& context, CUresult status) {
  CUresult none = CUDA_SUCCESS;  // the first error stays
  context.sticky.compare_exchange_strong(none, status, std::memory_order_acq_rel);
}

// A stream's thread. Work of a broken context is passed over, so that whoever waits for it goes on.
void run(const std::shared_ptr<Stream>& stream) {
  Context& context = stream->context;
  EngineLock lock(engine().mutex);
  while (true) {
    stream->arrived.wait(lock, [&] { return !stream->queue.empty() || stream->is_destroyed; });
    if (stream->queue.empty()) break;
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    engine().progress.wait(lock, [&] { return context.is_broken() || are_complete(operation.after); });
    operation.after.clear();
    lock.unlock();
    if (operation.work && !context.is_broken()) {
      const CUresult status = without_exceptions(operation.work);
      if (status != CUDA_SUCCESS) break_context(context, status);
    }
    operation.work = nullptr;  // what it owns dies without the lock
    lock.lock();
    ++stream->completed;
    engine().progress.notify_all();
  }
  auto& streams = context.streams;
  streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
}

// Starts a thread that takes no signals: they are for the program's own threads.
void start(const std::shared_ptr<Stream>& stream) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const CUresult status = without_exceptions([&] {
    std::thread(run, stream).detach();
    return CUDA_SUCCESS;
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) throw std::bad_alloc();
  if (status != CUDA_SUCCESS)
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
}

CUresult default_stream(bool is_per_thread, std::shared_ptr<Stream>& found) {
  Context* context = nullptr;
  if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
  std::shared_ptr<Stream>& stream = is_per_thread ? context->per_thread_stream : context->legacy_stream;
  if (stream == nullptr) stream = make_stream(*context, true);
  found = stream;
  return CUDA_SUCCESS;
}

void add_if_pending(Marks& marks, const std::shared_ptr<Stream>& stream) {
  if (stream != nullptr && stream->completed < stream->submitted)
    marks.push_back({stream, stream->submitted});
}

// The legacy stream waits for every blocking stream of its context, and they for it.
void add_implicit(Marks& marks, const Stream& stream) {
  const Context& context = stream.context;
  if (&stream != context.legacy_stream.get()) {
    if (stream.is_blocking) add_if_pending(marks, context.legacy_stream);
    return;
  }
  for (const auto& other : context.streams) {
    if (other->is_blocking && other.get() != &stream) add_if_pending(marks, other);
  }
}

void destroy(Stream& stream) {
  if (stream.capture != nullptr) {
    const std::shared_ptr<Capture> capture = stream.capture;
    invalidate(*capture);
    if (capture->origin.get() == &stream) end_capture(capture);  // nobody can end it any more
  }
  stream.is_destroyed = true;
  stream.arrived.notify_all();
}

}  // namespace

Engine& engine() {
  static auto* const made = new Engine();
  return *made;
}

CUresult find_stream(CUstream handle, std::shared_ptr<Stream>& found) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return default_stream(false, found);
  if (handle == CU_STREAM_PER_THREAD) return default_stream(true, found);
  const auto entry = engine().streams.find(reinterpret_cast<std::uintptr_t>(handle));
  if (entry == engine().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  found = entry->second;
  return found->context.status();
}

Marks marks_of(const std::shared_ptr<Stream>& stream) {
  Marks marks;
  add_if_pending(marks, stream);
  add_implicit(marks, *stream);
  return marks;
}

Marks marks_of(const Context& context) {
  Marks marks;
  for (const auto& stream : context.streams) add_if_pending(marks, stream);
  // A stream made by a later call starts behind these; an event recorded now stands for them too.
  for (const Mark& mark : context.awaited) {
    if (!mark.is_complete()) marks.push_back(mark);
  }
  return marks;
}

bool are_complete(const Marks& marks) {
  return std::all_of(marks.begin(), marks.end(), [](const Mark& mark) { return mark.is_complete(); });
}

void submit(const std::shared_ptr<Stream>& stream, Operation operation) {
  add_implicit(operation.after, *stream);
  stream->queue.push_back(std::move(operation));
  ++stream->submitted;
  stream->arrived.notify_one();
}

CUresult submit_or_capture(CUstream handle, Work work, Marks* submitted) {
  const EngineLock lock(engine().mutex);
  std::shared_ptr<Stream> stream;
  if (const CUresult status = find_stream(handle, stream); status != CUDA_SUCCESS) return status;
  if (stream->capture != nullptr) {
    if (stream->capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    add_node(*stream, std::move(work));
    return CUDA_SUCCESS;
  }
  if (const CUresult status = check_legacy(*stream, true); status != CUDA_SUCCESS) return status;
  submit(stream, Operation{{}, std::move(work)});
  if (submitted != nullptr) *submitted = Marks{{stream, stream->submitted}};
  return CUDA_SUCCESS;
}

CUresult wait_for(EngineLock& lock, const Context& context, const Marks& marks) {
  engine().progress.wait(lock, [&] { return context.is_broken() || are_complete(marks); });
  return context.status();
}

std::shared_ptr<Stream> make_stream(Context& context, bool is_blocking) {
  auto& awaited = context.awaited;
  awaited.erase(
      std::remove_if(awaited.begin(), awaited.end(), [](const Mark& mark) { return mark.is_complete(); }),
      awaited.end());
  auto stream = std::make_shared<Stream>(context, is_blocking);
  if (!awaited.empty()) submit(stream, Operation{awaited, {}});
  context.streams.push_back(stream);
  try {
    start(stream);
  } catch (...) {
    context.streams.pop_back();
    throw;
  }
  return stream;
}

void destroy_streams_and_events(Context& context) {
  const EngineLock lock(engine().mutex);
  for (const auto& stream : context.streams) destroy(*stream);
  context.legacy_stream = nullptr;
  context.per_thread_stream = nullptr;
  context.awaited.clear();
  for (auto entry = engine().streams.begin(); entry != engine().streams.end();) {
    entry = &entry->second->context == &context ? engine().streams.erase(entry) : std::next(entry);
  }
  for (auto entry = engine().events.begin(); entry != engine().events.end();) {
    entry = &entry->second->context == &context ? engine().events.erase(entry) : std::next(entry);
  }
}

namespace calls {

CUresult cuStreamCreate(CUstream* handle, unsigned int flags) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    if (handle == nullptr || (flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const EngineLock lock(engine().mutex);
    // The place in the table first: once the thread runs, nothing may fail.
    const std::uintptr_t id = engine().next_handle++;
    std::shared_ptr<Stream>& place = engine().streams[id];
    const CUresult status = without_exceptions([&] {
      place = make_stream(*context, (flags & CU_STREAM_NON_BLOCKING) == 0);
      return CUDA_SUCCESS;
    });
    if (status != CUDA_SUCCESS) {
      engine().streams.erase(id);
      return status;
    }
    *handle = reinterpret_cast<CUstream>(id);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamDestroy(CUstream handle) {
  return entry([&] {
    const EngineLock lock(engine().mutex);
    const auto found = engine().streams.find(reinterpret_cast<std::uintptr_t>(handle));
    if (found == engine().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
    const std::shared_ptr<Stream> stream = found->second;
    destroy(*stream);
    engine().streams.erase(found);
    return stream->context.status();
  });
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return entry([&] {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const EngineLock lock(engine().mutex);
    std::shared_ptr<Stream> stream;
    if (const CUresult status = find_stream(handle, stream); status != CUDA_SUCCESS) return status;
    *context = handle_of(stream->context);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  return entry([&] {
    EngineLock lock(engine().mutex);
    std::shared_ptr<Stream> stream;
    if (const CUresult status = find_stream(handle, stream); status != CUDA_SUCCESS) return status;
    if (const CUresult status = check_not_capturing(*stream); status != CUDA_SUCCESS) return status;
    if (const CUresult status = check_unsafe_call(); status != CUDA_SUCCESS) return status;
    return wait_for(lock, stream->context, marks_of(stream));
  });
}

CUresult cuStreamQuery(CUstream handle) {
  return entry([&] {
    const EngineLock lock(engine().mutex);
    std::shared_ptr<Stream> stream;
    if (const CUresult status = find_stream(handle, stream); status != CUDA_SUCCESS) return status;
    if (const CUresult status = check_not_capturing(*stream); status != CUDA_SUCCESS) return status;
    if (const CUresult status = check_unsafe_call(); status != CUDA_SUCCESS) return status;
    return marks_of(stream).empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuCtxSynchronize() {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    EngineLock lock(engine().mutex);
    if (const CUresult status = check_no_capture(*context); status != CUDA_SUCCESS) return status;
    if (const CUresult status = check_unsafe_call(); status != CUDA_SUCCESS) return status;
    return wait_for(lock, *context, marks_of(*context));
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
