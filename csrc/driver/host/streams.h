// Streams as threads: work in order on each, and marks that say how far a stream has come.
//
// Lock order: engine().mutex, the memory book's mutex and the registry's mutex are never held together;
// a device's own mutex is a leaf under any of them. User code (host functions) runs without any.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "driver/host/contexts.h"

namespace fencepool::host_driver {

struct Capture;

// Work that runs on a stream's thread, without locks; more than once when a graph holds it. Anything but
// CUDA_SUCCESS ends the context.
using Work = std::function<CUresult()>;

struct Operation {
  Marks after;  // complete before the work begins
  Work work;    // may be empty: a mere wait
};

struct Stream {
  Stream(Context& context_, bool is_blocking_) : context(context_), is_blocking(is_blocking_) {}

  Context& context;
  const bool is_blocking;           // ordered with the legacy stream: made without CU_STREAM_NON_BLOCKING
  std::condition_variable arrived;  // its thread waits here for work

  // Guarded by engine().mutex.
  std::deque<Operation> queue;
  std::uint64_t submitted = 0;
  std::uint64_t completed = 0;
  bool is_destroyed = false;         // its thread ends when the queue is empty
  std::shared_ptr<Capture> capture;  // null: not capturing
  std::vector<std::size_t> tips;     // nodes of the capture that the stream's next node follows
};

inline bool Mark::is_complete() const { return stream->completed >= sequence; }

// An event: what it was last recorded behind. Never recorded: nothing, so complete.
struct Event {
  explicit Event(Context& context_) : context(context_) {}
  Context& context;
  // Guarded by engine().mutex.
  Marks marks;
  std::shared_ptr<Capture> capture;  // set: last recorded in this capture, at `tips`
  std::vector<std::size_t> tips;
};

// What a captured sequence becomes: its work in the order of capture, which respects every dependency.
using Program = std::shared_ptr<const std::vector<Work>>;

struct GraphExec {
  Program program;
  Marks last_launch;  // a launch follows the one before, on whatever stream
};

struct Engine {
  std::mutex mutex;
  std::condition_variable progress;  // some stream completed an operation, or a context broke

  // Guarded by mutex. Handles are numbers that are never used again, so that a stale one is told apart.
  std::uintptr_t next_handle = 0x1000;  // above CUDA's special stream handles
  std::unordered_map<std::uintptr_t, std::shared_ptr<Stream>> streams;
  std::unordered_map<std::uintptr_t, std::shared_ptr<Event>> events;
  std::unordered_map<std::uintptr_t, Program> graphs;
  std::unordered_map<std::uintptr_t, std::shared_ptr<GraphExec>> executables;
  std::vector<std::shared_ptr<Capture>> captures;  // those that have not ended
};

// Never destroyed: stream threads may outlive main().
Engine& engine();
using EngineLock = std::unique_lock<std::mutex>;

// All functions below REQUIRE engine().mutex unless they say otherwise.

// The stream a handle names; the special handles name the current context's default streams. INVALID_HANDLE,
// INVALID_CONTEXT (a special handle and no current context), or the context's sticky error.
CUresult find_stream(CUstream handle, std::shared_ptr<Stream>& found);
CUresult find_event(CUevent handle, std::shared_ptr<Event>& found);

// Work given to the stream so far, with what the legacy stream's rules put before its next operation.
Marks marks_of(const std::shared_ptr<Stream>& stream);
// Work given to the context so far on every stream.
Marks marks_of(const Context& context);
bool are_complete(const Marks& marks);

// Appends to a stream that does not capture.
void submit(const std::shared_ptr<Stream>& stream, Operation operation);

// Appends to the stream, or to the capture it is part of. With `submitted`, gives what to wait for (nothing
// when captured). `after` is for streams that do not capture. Takes the mutex itself.
CUresult submit_or_capture(CUstream handle, Work work, Marks* submitted = nullptr);

// Waits until the marks are complete or the context is broken; the context's status then.
CUresult wait_for(EngineLock& lock, const Context& context, const Marks& marks);

// A new stream with its thread, behind everything the context has to wait for.
std::shared_ptr<Stream> make_stream(Context& context, bool is_blocking);

// The last release of a context. Takes the mutex itself.
void destroy_streams_and_events(Context& context);

}  // namespace fencepool::host_driver
