#include "driver/host/captures.h"

#include <algorithm>

namespace fencepool::host_driver {
namespace {

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

bool is_mode(CUstreamCaptureMode mode) {
  return mode == CU_STREAM_CAPTURE_MODE_GLOBAL || mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ||
         mode == CU_STREAM_CAPTURE_MODE_RELAXED;
}

// Whether the capture forbids this thread an unsafe call, by the thread's mode and the capture's.
bool is_in_the_way(const Capture& capture) {
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  if (capture.thread == std::this_thread::get_id()) return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

// Invalidates the captures that `conflicts` picks; UNSUPPORTED when there is one.
template <typename Conflicts>
CUresult refuse(Conflicts&& conflicts) {
  CUresult status = CUDA_SUCCESS;
  for (const auto& capture : engine().captures) {
    if (!conflicts(*capture)) continue;
    invalidate(*capture);
    status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return status;
}

bool has_stream_of(const Capture& capture, const Context& context) {
  return std::any_of(capture.streams.begin(), capture.streams.end(),
                     [&](const auto& stream) { return &stream->context == &context; });
}

// Whether every node the streams end with leads to the origin's next node: all forks were joined.
bool is_joined(const Capture& capture) {
  std::vector<bool> is_reached(capture.nodes.size(), false);
  std::vector<std::size_t> open = capture.origin->tips;
  while (!open.empty()) {
    const std::size_t node = open.back();
    open.pop_back();
    if (is_reached[node]) continue;
    is_reached[node] = true;
    open.insert(open.end(), capture.nodes[node].after.begin(), capture.nodes[node].after.end());
  }
  return std::all_of(is_reached.begin(), is_reached.end(), [](bool reached) { return reached; });
}

}  // namespace

void invalidate(Capture& capture) { capture.is_invalidated = true; }

void join_capture(const std::shared_ptr<Capture>& capture, const std::shared_ptr<Stream>& stream) {
  capture->streams.push_back(stream);
  stream->capture = capture;
  stream->tips.clear();
}

void end_capture(const std::shared_ptr<Capture>& capture) {
  for (const auto& stream : capture->streams) {
    stream->capture = nullptr;
    stream->tips.clear();
  }
  capture->streams.clear();
  capture->origin = nullptr;
  capture->nodes.clear();
  capture->is_ended = true;
  auto& all = engine().captures;
  all.erase(std::remove(all.begin(), all.end(), capture), all.end());
}

void add_node(Stream& stream, Work work) {
  Capture& capture = *stream.capture;
  stream.tips.reserve(stream.tips.size() + 1);
  capture.nodes.push_back({std::move(work), stream.tips});
  stream.tips.assign(1, capture.nodes.size() - 1);
}

CUresult check_unsafe_call() { return refuse(is_in_the_way); }

CUresult check_no_capture(const Context& context) {
  return refuse([&](const Capture& capture) { return has_stream_of(capture, context); });
}

CUresult check_not_capturing(const Stream& stream) {
  if (stream.capture == nullptr) return check_legacy(stream, true);
  if (stream.capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  invalidate(*stream.capture);
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult check_legacy(const Stream& stream, bool is_use) {
  const Context& context = stream.context;
  if (&stream != context.legacy_stream.get()) return CUDA_SUCCESS;
  CUresult status = CUDA_SUCCESS;
  for (const auto& other : context.streams) {
    if (!other->is_blocking || other->capture == nullptr) continue;
    if (is_use) invalidate(*other->capture);
    status = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return status;
}

namespace calls {

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return entry([&] {
    if (mode == nullptr || !is_mode(*mode)) return CUDA_ERROR_INVALID_VALUE;
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  return entry([&] {
    if (!is_mode(mode)) return CUDA_ERROR_INVALID_VALUE;
    auto capture = std::make_shared<Capture>();
    const EngineLock lock(engine().mutex);
    std::shared_ptr<Stream> stream;
    if (const CUresult status = find_stream(handle, stream); status != CUDA_SUCCESS) return status;
    if (stream == stream->context.legacy_stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    capture->origin = stream;
    capture->thread = std::this_thread::get_id();
    capture->mode = mode;
    engine().captures.reserve(engine().captures.size() + 1);
    join_capture(capture, stream);
    engine().captures.push_back(std::move(capture));
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* result) {
  return entry([&] {
    if (result == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const EngineLock lock(engine().mutex);
    std::shared_ptr<Stream> stream;
    if (const CUresult status = find_stream(handle, stream); status != CUDA_SUCCESS) return status;
    if (const CUresult status = check_legacy(*stream, false); status != CUDA_SUCCESS) return status;
    *result = stream->capture == nullptr        ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->is_invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                                : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  return entry([&] {
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const EngineLock lock(engine().mutex);
    std::shared_ptr<Stream> stream;
    const CUresult found = find_stream(handle, stream);
    if (stream == nullptr) return found;  // a broken context's capture is ended all the same
    *graph = nullptr;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
      return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    if (capture->origin != stream) {
      invalidate(*capture);
      return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    const bool was_invalidated = capture->is_invalidated;
    const bool was_joined = is_joined(*capture);
    auto program = std::make_shared<std::vector<Work>>();
    program->reserve(capture->nodes.size());
    for (Capture::Node& node : capture->nodes) program->push_back(std::move(node.work));
    end_capture(capture);
    if (found != CUDA_SUCCESS) return found;
    if (was_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!was_joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    const std::uintptr_t id = engine().next_handle++;
    engine().graphs.emplace(id, std::move(program));
    *graph = reinterpret_cast<CUgraph>(id);
    return CUDA_SUCCESS;
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
