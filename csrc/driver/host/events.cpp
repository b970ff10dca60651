// Events: what work was given before a point, and waiting for it.
#include <algorithm>

#include "driver/host/captures.h"

namespace fencepool::host_driver {
namespace {

constexpr unsigned int kEventFlags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;

// Whether the event may be asked about or waited for by the host.
CUresult check_event(const Event& event) {
  if (event.capture == nullptr) return check_unsafe_call();
  if (!event.capture->is_ended) invalidate(*event.capture);
  return CUDA_ERROR_CAPTURED_EVENT;
}

// A capturing stream waits for an event: only work of the same capture may be waited for.
CUresult wait_in_capture(Stream& stream, const Event& event) {
  Capture& capture = *stream.capture;
  if (capture.is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (event.capture == nullptr || event.capture->is_ended) {
    invalidate(capture);
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (event.capture != stream.capture) {
    invalidate(capture);
    invalidate(*event.capture);
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  stream.tips.insert(stream.tips.end(), event.tips.begin(), event.tips.end());
  return CUDA_SUCCESS;
}

// A stream that does not capture waits for an event of a capture: it becomes part of that capture.
CUresult join_by_event(const std::shared_ptr<Stream>& stream, const Event& event) {
  if (event.capture->is_ended) return CUDA_ERROR_INVALID_VALUE;
  if (event.capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream == stream->context.legacy_stream) {
    invalidate(*event.capture);
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  join_capture(event.capture, stream);
  stream->tips = event.tips;
  return CUDA_SUCCESS;
}

void add_pending(Marks& marks, const Marks& added) {
  std::copy_if(added.begin(), added.end(), std::back_inserter(marks),
               [](const Mark& mark) { return !mark.is_complete(); });
}

}  // namespace

CUresult find_event(CUevent handle, std::shared_ptr<Event>& found) {
  const auto entry = engine().events.find(reinterpret_cast<std::uintptr_t>(handle));
  if (entry == engine().events.end()) return CUDA_ERROR_INVALID_HANDLE;
  found = entry->second;
  return found->context.status();
}

namespace calls {

CUresult cuEventCreate(CUevent* handle, unsigned int flags) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if ((flags & CU_EVENT_INTERPROCESS) != 0) return CUDA_ERROR_NOT_SUPPORTED;
    if ((flags & ~kEventFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
    auto event = std::make_shared<Event>(*context);
    const EngineLock lock(engine().mutex);
    const std::uintptr_t id = engine().next_handle++;
    engine().events.emplace(id, std::move(event));
    *handle = reinterpret_cast<CUevent>(id);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventDestroy(CUevent handle) {
  return entry([&] {
    const EngineLock lock(engine().mutex);
    const auto found = engine().events.find(reinterpret_cast<std::uintptr_t>(handle));
    if (found == engine().events.end()) return CUDA_ERROR_INVALID_HANDLE;
    const Context& context = found->second->context;
    engine().events.erase(found);  // those who wait for its marks hold them themselves
    return context.status();
  });
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  return entry([&] {
    const EngineLock lock(engine().mutex);
    std::shared_ptr<Event> event;
    std::shared_ptr<Stream> stream;
    if (const CUresult status = find_event(handle, event); status != CUDA_SUCCESS) return status;
    if (const CUresult status = find_stream(stream_handle, stream); status != CUDA_SUCCESS) return status;
    if (&event->context != &stream->context) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) {
      if (stream->capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
      event->tips = stream->tips;
      event->capture = stream->capture;
      event->marks.clear();
      return CUDA_SUCCESS;
    }
    if (const CUresult status = check_legacy(*stream, true); status != CUDA_SUCCESS) return status;
    event->marks = marks_of(stream);
    event->capture = nullptr;
    return CUDA_SUCCESS;
  });
}

CUresult cuEventQuery(CUevent handle) {
  return entry([&] {
    const EngineLock lock(engine().mutex);
    std::shared_ptr<Event> event;
    if (const CUresult status = find_event(handle, event); status != CUDA_SUCCESS) return status;
    if (const CUresult status = check_event(*event); status != CUDA_SUCCESS) return status;
    return are_complete(event->marks) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventSynchronize(CUevent handle) {
  return entry([&] {
    EngineLock lock(engine().mutex);
    std::shared_ptr<Event> event;
    if (const CUresult status = find_event(handle, event); status != CUDA_SUCCESS) return status;
    if (const CUresult status = check_event(*event); status != CUDA_SUCCESS) return status;
    const Marks marks = event->marks;  // a later record does not move what this call waits for
    return wait_for(lock, event->context, marks);
  });
}

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned int flags) {
  return entry([&] {
    const EngineLock lock(engine().mutex);
    std::shared_ptr<Event> event;
    std::shared_ptr<Stream> stream;
    if (const CUresult status = find_event(handle, event); status != CUDA_SUCCESS) return status;
    if (const CUresult status = find_stream(stream_handle, stream); status != CUDA_SUCCESS) return status;
    if ((flags & CU_EVENT_WAIT_EXTERNAL) != 0 && stream->capture != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    if (flags != CU_EVENT_WAIT_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture != nullptr) return wait_in_capture(*stream, *event);
    if (event->capture != nullptr) return join_by_event(stream, *event);
    if (const CUresult status = check_legacy(*stream, true); status != CUDA_SUCCESS) return status;
    Operation wait;
    add_pending(wait.after, event->marks);
    if (!wait.after.empty()) submit(stream, std::move(wait));
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxRecordEvent(CUcontext context_handle, CUevent handle) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = find_context(context_handle, context); status != CUDA_SUCCESS) return status;
    const EngineLock lock(engine().mutex);
    std::shared_ptr<Event> event;
    if (const CUresult status = find_event(handle, event); status != CUDA_SUCCESS) return status;
    if (&event->context != context) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult status = check_no_capture(*context); status != CUDA_SUCCESS) return status;
    event->marks = marks_of(*context);
    event->capture = nullptr;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxWaitEvent(CUcontext context_handle, CUevent handle) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = find_context(context_handle, context); status != CUDA_SUCCESS) return status;
    const EngineLock lock(engine().mutex);
    std::shared_ptr<Event> event;
    if (const CUresult status = find_event(handle, event); status != CUDA_SUCCESS) return status;
    if (event->capture != nullptr) {
      if (!event->capture->is_ended) invalidate(*event->capture);
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (const CUresult status = check_no_capture(*context); status != CUDA_SUCCESS) return status;
    Marks pending;
    add_pending(pending, event->marks);
    if (pending.empty()) return CUDA_SUCCESS;
    // Streams to come wait for it when they are made; should memory run out half-way, some streams wait
    // for more than they must.
    context->awaited.insert(context->awaited.end(), pending.begin(), pending.end());
    for (const auto& stream : context->streams) {
      if (!stream->is_destroyed) submit(stream, Operation{pending, {}});
    }
    return CUDA_SUCCESS;
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
