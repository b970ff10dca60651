// One provider's driver, call by call: integers in, the CUresult and what the call gave out.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "bindings/latch.h"
#include "driver/driver.h"

namespace fencepool {

// Every handle and address is an integer. Each method is one driver call, and returns its CUresult: alone,
// or first in a tuple with what the call filled in. Thread-safe.
class RawDriver {
 public:
  using Integer = std::uint64_t;
  using WithInteger = std::tuple<int, Integer>;

  // Throws Error(kUnavailable) with the reason when the provider cannot be used.
  explicit RawDriver(Provider provider) : driver_(Driver::get(provider)) {}

  // The library and devices.
  int init(unsigned flags) { return driver_.call<Call::cuInit>(flags); }
  std::tuple<int, int> driver_version();
  std::tuple<int, std::string> error_name(int code);
  std::tuple<int, std::string> error_string(int code);
  std::tuple<int, int> device_count();
  std::tuple<int, int> device_get(int ordinal);
  std::tuple<int, std::string> device_name(int device);
  std::tuple<int, std::string> device_bus_id(int device, int length);
  std::tuple<int, int> device_attribute(int attribute, int device);
  WithInteger device_total_mem(int device);

  // Contexts.
  WithInteger primary_retain(int device);
  int primary_release(int device) { return driver_.call<Call::cuDevicePrimaryCtxRelease>(device); }
  int push(Integer context) {
    return driver_.call<Call::cuCtxPushCurrent>(reinterpret_cast<CUcontext>(context));
  }
  WithInteger pop();
  WithInteger current();
  int ctx_synchronize() { return driver_.call<Call::cuCtxSynchronize>(); }
  int ctx_record_event(Integer context, Integer event);
  int ctx_wait_event(Integer context, Integer event);

  // Memory. `location` and `handle_types` are CUDA's enumerators; sizes are bytes.
  std::tuple<int, Integer, Integer> mem_get_info();
  WithInteger granularity(int device, int option, int location);
  WithInteger address_reserve(Integer size, Integer alignment, Integer hint);
  int address_free(Integer address, Integer size) {
    return driver_.call<Call::cuMemAddressFree>(address, size);
  }
  WithInteger mem_create(int device, Integer size, bool is_exportable, int location, int type,
                         int handle_types);
  int mem_release(Integer handle) { return driver_.call<Call::cuMemRelease>(handle); }
  int mem_map(Integer address, Integer size, Integer handle, Integer offset) {
    return driver_.call<Call::cuMemMap>(address, size, offset, handle, 0);
  }
  int mem_unmap(Integer address, Integer size) { return driver_.call<Call::cuMemUnmap>(address, size); }
  int mem_set_access(Integer address, Integer size, int device, int flags, int location);
  WithInteger mem_get_access(Integer address, int device, int where);
  WithInteger mem_retain(Integer address);
  std::tuple<int, int> mem_export(Integer handle);
  WithInteger mem_import(int descriptor);
  int host_register(Integer address, Integer size, unsigned flags);
  int host_unregister(Integer address);
  WithInteger host_device_pointer(Integer address);

  // Modules and kernels: fencepool's own image and kernel where no other is named.
  WithInteger module_load(const std::string& image);
  int module_unload(Integer module);
  WithInteger module_function(Integer module, const std::string& name);
  int launch_digest(Integer function, Integer output, Integer address, Integer size, Integer stream);

  // Work on streams.
  int memcpy_htod(Integer to, Integer from, Integer size, Integer stream);
  int memcpy_dtoh(Integer to, Integer from, Integer size, Integer stream);
  int memcpy_dtod(Integer to, Integer from, Integer size, Integer stream);
  int memset_d8(Integer to, unsigned char value, Integer size, Integer stream);
  int hold(Latch& latch, Integer stream);
  // Queues a host function that itself makes a driver call; gives what that call returned.
  std::tuple<int, int> call_inside_host_function(Integer stream);

  // Streams, events, captures, graphs.
  WithInteger stream_create(unsigned flags);
  int stream_destroy(Integer stream);
  int stream_synchronize(Integer stream);
  int stream_query(Integer stream);
  int stream_wait_event(Integer stream, Integer event, unsigned flags);
  WithInteger stream_get_ctx(Integer stream);
  std::tuple<int, int> stream_is_capturing(Integer stream);
  int begin_capture(Integer stream, int mode);
  WithInteger end_capture(Integer stream);
  std::tuple<int, int> exchange_capture_mode(int mode);
  WithInteger event_create(unsigned flags);
  int event_destroy(Integer event);
  int event_record(Integer event, Integer stream);
  int event_query(Integer event);
  int event_synchronize(Integer event);
  WithInteger graph_instantiate(Integer graph, Integer flags);
  int graph_launch(Integer executable, Integer stream);
  int graph_exec_destroy(Integer executable);
  int graph_destroy(Integer graph);

 private:
  Driver& driver_;
};

}  // namespace fencepool
