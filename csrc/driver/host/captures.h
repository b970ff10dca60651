// Stream capture: what is recorded, and what may not happen meanwhile.
#pragma once

#include <thread>

#include "driver/host/streams.h"

namespace fencepool::host_driver {

// One capture sequence: a graph of nodes that grows while its streams are given work.
struct Capture {
  struct Node {
    Work work;
    std::vector<std::size_t> after;  // nodes it depends on
  };

  std::shared_ptr<Stream> origin;  // began it, and must end it
  std::thread::id thread;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  bool is_invalidated = false;
  bool is_ended = false;
  std::vector<Node> nodes;
  std::vector<std::shared_ptr<Stream>> streams;  // the origin and those that joined
};

// All of these REQUIRE engine().mutex.

void invalidate(Capture& capture);
// Lets its streams go; its events stay "recorded in a capture" until they are recorded anew.
void end_capture(const std::shared_ptr<Capture>& capture);
void join_capture(const std::shared_ptr<Capture>& capture, const std::shared_ptr<Stream>& stream);
void add_node(Stream& stream, Work work);

// Whether this thread may make a "potentially unsafe" call now (cuThreadExchangeStreamCaptureMode):
// STREAM_CAPTURE_UNSUPPORTED, and the captures in the way are invalidated, when it may not.
CUresult check_unsafe_call();

// Whether a stream of the context captures: STREAM_CAPTURE_UNSUPPORTED, and those captures are invalidated.
CUresult check_no_capture(const Context& context);

// Whether the stream's own state lets it be waited for or queried: UNSUPPORTED, INVALIDATED or IMPLICIT.
CUresult check_not_capturing(const Stream& stream);

// Whether the legacy stream may be used: IMPLICIT while a blocking stream of its context captures, which
// invalidates that capture when `is_use`. CUDA_SUCCESS for any other stream.
CUresult check_legacy(const Stream& stream, bool is_use);

}  // namespace fencepool::host_driver
