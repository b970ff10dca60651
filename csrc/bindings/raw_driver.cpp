#include "bindings/raw_driver.h"

namespace fencepool {
namespace {

using Integer = RawDriver::Integer;
using WithInteger = RawDriver::WithInteger;

CUstream stream_of(Integer handle) { return reinterpret_cast<CUstream>(handle); }
CUevent event_of(Integer handle) { return reinterpret_cast<CUevent>(handle); }
CUcontext context_of(Integer handle) { return reinterpret_cast<CUcontext>(handle); }

template <typename Handle>
WithInteger with_handle(CUresult status, Handle handle) {
  return {status, reinterpret_cast<Integer>(handle)};
}

std::tuple<int, std::string> with_text(CUresult status, const char* text) {
  return {status, text != nullptr ? text : ""};
}

}  // namespace

std::tuple<int, int> RawDriver::driver_version() {
  int version = 0;
  const CUresult status = driver_.call<Call::cuDriverGetVersion>(&version);
  return {status, version};
}

std::tuple<int, std::string> RawDriver::error_name(int code) {
  const char* text = nullptr;
  const CUresult status = driver_.call<Call::cuGetErrorName>(static_cast<CUresult>(code), &text);
  return with_text(status, text);
}

std::tuple<int, std::string> RawDriver::error_string(int code) {
  const char* text = nullptr;
  const CUresult status = driver_.call<Call::cuGetErrorString>(static_cast<CUresult>(code), &text);
  return with_text(status, text);
}

std::tuple<int, int> RawDriver::device_count() {
  int count = 0;
  const CUresult status = driver_.call<Call::cuDeviceGetCount>(&count);
  return {status, count};
}

std::tuple<int, int> RawDriver::device_get(int ordinal) {
  CUdevice device = -1;
  const CUresult status = driver_.call<Call::cuDeviceGet>(&device, ordinal);
  return {status, device};
}

std::tuple<int, std::string> RawDriver::device_name(int device) {
  char name[256] = {};
  const CUresult status = driver_.call<Call::cuDeviceGetName>(name, sizeof(name), device);
  return with_text(status, name);
}

std::tuple<int, std::string> RawDriver::device_bus_id(int device, int length) {
  std::string text(static_cast<std::size_t>(length > 0 ? length : 1), '\0');
  const CUresult status = driver_.call<Call::cuDeviceGetPCIBusId>(text.data(), length, device);
  return with_text(status, text.c_str());
}

std::tuple<int, int> RawDriver::device_attribute(int attribute, int device) {
  int value = -1;
  const CUresult status =
      driver_.call<Call::cuDeviceGetAttribute>(&value, static_cast<CUdevice_attribute>(attribute), device);
  return {status, value};
}

WithInteger RawDriver::device_total_mem(int device) {
  std::size_t bytes = 0;
  const CUresult status = driver_.call<Call::cuDeviceTotalMem>(&bytes, device);
  return {status, bytes};
}

WithInteger RawDriver::primary_retain(int device) {
  CUcontext context = nullptr;
  const CUresult status = driver_.call<Call::cuDevicePrimaryCtxRetain>(&context, device);
  return with_handle(status, context);
}

WithInteger RawDriver::pop() {
  CUcontext context = nullptr;
  const CUresult status = driver_.call<Call::cuCtxPopCurrent>(&context);
  return with_handle(status, context);
}

WithInteger RawDriver::current() {
  CUcontext context = nullptr;
  const CUresult status = driver_.call<Call::cuCtxGetCurrent>(&context);
  return with_handle(status, context);
}

int RawDriver::ctx_record_event(Integer context, Integer event) {
  return driver_.call<Call::cuCtxRecordEvent>(context_of(context), event_of(event));
}

int RawDriver::ctx_wait_event(Integer context, Integer event) {
  return driver_.call<Call::cuCtxWaitEvent>(context_of(context), event_of(event));
}

int RawDriver::hold(Latch& latch, Integer stream) {
  return driver_.call<Call::cuLaunchHostFunc>(stream_of(stream), &Latch::hold, latch.gate());
}

std::tuple<int, int> RawDriver::call_inside_host_function(Integer stream) {
  struct Inside {
    Driver* driver;
    int status;
  };
  Inside inside{&driver_, -1};
  const CUhostFn function = [](void* data) {
    auto* made = static_cast<Inside*>(data);
    std::size_t free = 0;
    std::size_t total = 0;
    made->status = made->driver->call<Call::cuMemGetInfo>(&free, &total);
  };
  const CUresult status =
      driver_.call<Call::cuLaunchHostFunc>(stream_of(stream), function, static_cast<void*>(&inside));
  if (status == CUDA_SUCCESS) driver_.call<Call::cuStreamSynchronize>(stream_of(stream));
  return {status, inside.status};
}

WithInteger RawDriver::stream_create(unsigned flags) {
  CUstream stream = nullptr;
  const CUresult status = driver_.call<Call::cuStreamCreate>(&stream, flags);
  return with_handle(status, stream);
}

int RawDriver::stream_destroy(Integer stream) {
  return driver_.call<Call::cuStreamDestroy>(stream_of(stream));
}
int RawDriver::stream_synchronize(Integer stream) {
  return driver_.call<Call::cuStreamSynchronize>(stream_of(stream));
}
int RawDriver::stream_query(Integer stream) { return driver_.call<Call::cuStreamQuery>(stream_of(stream)); }

int RawDriver::stream_wait_event(Integer stream, Integer event, unsigned flags) {
  return driver_.call<Call::cuStreamWaitEvent>(stream_of(stream), event_of(event), flags);
}

WithInteger RawDriver::stream_get_ctx(Integer stream) {
  CUcontext context = nullptr;
  const CUresult status = driver_.call<Call::cuStreamGetCtx>(stream_of(stream), &context);
  return with_handle(status, context);
}

std::tuple<int, int> RawDriver::stream_is_capturing(Integer stream) {
  CUstreamCaptureStatus result = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult status = driver_.call<Call::cuStreamIsCapturing>(stream_of(stream), &result);
  return {status, result};
}

int RawDriver::begin_capture(Integer stream, int mode) {
  return driver_.call<Call::cuStreamBeginCapture>(stream_of(stream), static_cast<CUstreamCaptureMode>(mode));
}

WithInteger RawDriver::end_capture(Integer stream) {
  CUgraph graph = nullptr;
  const CUresult status = driver_.call<Call::cuStreamEndCapture>(stream_of(stream), &graph);
  return with_handle(status, graph);
}

std::tuple<int, int> RawDriver::exchange_capture_mode(int mode) {
  auto exchanged = static_cast<CUstreamCaptureMode>(mode);
  const CUresult status = driver_.call<Call::cuThreadExchangeStreamCaptureMode>(&exchanged);
  return {status, exchanged};
}

WithInteger RawDriver::event_create(unsigned flags) {
  CUevent event = nullptr;
  const CUresult status = driver_.call<Call::cuEventCreate>(&event, flags);
  return with_handle(status, event);
}

int RawDriver::event_destroy(Integer event) { return driver_.call<Call::cuEventDestroy>(event_of(event)); }
int RawDriver::event_query(Integer event) { return driver_.call<Call::cuEventQuery>(event_of(event)); }
int RawDriver::event_synchronize(Integer event) {
  return driver_.call<Call::cuEventSynchronize>(event_of(event));
}
int RawDriver::event_record(Integer event, Integer stream) {
  return driver_.call<Call::cuEventRecord>(event_of(event), stream_of(stream));
}

WithInteger RawDriver::graph_instantiate(Integer graph, Integer flags) {
  CUgraphExec executable = nullptr;
  const CUresult status =
      driver_.call<Call::cuGraphInstantiateWithFlags>(&executable, reinterpret_cast<CUgraph>(graph), flags);
  return with_handle(status, executable);
}

int RawDriver::graph_launch(Integer executable, Integer stream) {
  return driver_.call<Call::cuGraphLaunch>(reinterpret_cast<CUgraphExec>(executable), stream_of(stream));
}

int RawDriver::graph_exec_destroy(Integer executable) {
  return driver_.call<Call::cuGraphExecDestroy>(reinterpret_cast<CUgraphExec>(executable));
}

int RawDriver::graph_destroy(Integer graph) {
  return driver_.call<Call::cuGraphDestroy>(reinterpret_cast<CUgraph>(graph));
}

}  // namespace fencepool
