#include "bindings/raw.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/raw_driver.h"
#include "driver/host/host_driver.h"

namespace py = pybind11;

namespace fencepool {
namespace {

// Every call may block, and a blocked stream may need another Python thread to go on.
using WithoutGil = py::call_guard<py::gil_scoped_release>;

void bind_latch(py::module_& raw) {
  py::class_<Latch>(raw, "Latch", "Holds streams (Driver.hold) until it is opened, or dies.")
      .def(py::init<>())
      .def("open", &Latch::open, WithoutGil())
      .def("wait_until_held", &Latch::wait_until_held, py::arg("count") = 1, WithoutGil(),
           "Waits until `count` streams stand at the gate.")
      .def_property_readonly("waiting", &Latch::waiting)
      .def_property_readonly("passed", &Latch::passed);
}

void bind_driver_memory(py::class_<RawDriver>& driver) {
  const WithoutGil unlocked;
  driver.def("mem_get_info", &RawDriver::mem_get_info, unlocked)
      .def("granularity", &RawDriver::granularity, py::arg("device"), py::arg("option") = 0,
           py::arg("location") = static_cast<int>(CU_MEM_LOCATION_TYPE_DEVICE), unlocked)
      .def("address_reserve", &RawDriver::address_reserve, py::arg("size"), py::arg("alignment") = 0,
           py::arg("hint") = 0, unlocked)
      .def("address_free", &RawDriver::address_free, py::arg("address"), py::arg("size"), unlocked)
      .def("mem_create", &RawDriver::mem_create, py::arg("ordinal"), py::arg("size"),
           py::arg("exportable") = false, py::arg("location") = static_cast<int>(CU_MEM_LOCATION_TYPE_DEVICE),
           py::arg("type") = static_cast<int>(CU_MEM_ALLOCATION_TYPE_PINNED), py::arg("handle_types") = 0,
           unlocked)
      .def("mem_release", &RawDriver::mem_release, py::arg("handle"), unlocked)
      .def("mem_map", &RawDriver::mem_map, py::arg("address"), py::arg("size"), py::arg("handle"),
           py::arg("offset") = 0, unlocked)
      .def("mem_unmap", &RawDriver::mem_unmap, py::arg("address"), py::arg("size"), unlocked)
      .def("mem_set_access", &RawDriver::mem_set_access, py::arg("address"), py::arg("size"),
           py::arg("ordinal"), py::arg("flags") = static_cast<int>(CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
           py::arg("location") = static_cast<int>(CU_MEM_LOCATION_TYPE_DEVICE), unlocked)
      .def("mem_get_access", &RawDriver::mem_get_access, py::arg("address"), py::arg("ordinal"),
           py::arg("location") = static_cast<int>(CU_MEM_LOCATION_TYPE_DEVICE), unlocked)
      .def("mem_retain", &RawDriver::mem_retain, py::arg("address"), unlocked)
      .def("mem_export", &RawDriver::mem_export, py::arg("handle"), unlocked)
      .def("mem_import", &RawDriver::mem_import, py::arg("descriptor"), unlocked)
      .def("host_register", &RawDriver::host_register, py::arg("address"), py::arg("size"),
           py::arg("flags") = 0, unlocked)
      .def("host_unregister", &RawDriver::host_unregister, py::arg("address"), unlocked)
      .def("host_device_pointer", &RawDriver::host_device_pointer, py::arg("address"), unlocked)
      .def("module_load", &RawDriver::module_load, py::arg("image") = "", unlocked)
      .def("module_unload", &RawDriver::module_unload, py::arg("module"), unlocked)
      .def("module_function", &RawDriver::module_function, py::arg("module"), py::arg("name") = "", unlocked)
      .def("launch_digest", &RawDriver::launch_digest, py::arg("function"), py::arg("output"),
           py::arg("address"), py::arg("size"), py::arg("stream"), unlocked)
      .def("memcpy_htod", &RawDriver::memcpy_htod, py::arg("to"), py::arg("source"), py::arg("size"),
           py::arg("stream"), unlocked)
      .def("memcpy_dtoh", &RawDriver::memcpy_dtoh, py::arg("to"), py::arg("source"), py::arg("size"),
           py::arg("stream"), unlocked)
      .def("memcpy_dtod", &RawDriver::memcpy_dtod, py::arg("to"), py::arg("source"), py::arg("size"),
           py::arg("stream"), unlocked)
      .def("memset_d8", &RawDriver::memset_d8, py::arg("to"), py::arg("value"), py::arg("size"),
           py::arg("stream"), unlocked);
}

void bind_driver_streams(py::class_<RawDriver>& driver) {
  const WithoutGil unlocked;
  driver.def("stream_create", &RawDriver::stream_create, py::arg("flags") = 1, unlocked)
      .def("stream_destroy", &RawDriver::stream_destroy, py::arg("stream"), unlocked)
      .def("stream_synchronize", &RawDriver::stream_synchronize, py::arg("stream"), unlocked)
      .def("stream_query", &RawDriver::stream_query, py::arg("stream"), unlocked)
      .def("stream_wait_event", &RawDriver::stream_wait_event, py::arg("stream"), py::arg("event"),
           py::arg("flags") = 0, unlocked)
      .def("stream_get_ctx", &RawDriver::stream_get_ctx, py::arg("stream"), unlocked)
      .def("stream_is_capturing", &RawDriver::stream_is_capturing, py::arg("stream"), unlocked)
      .def("begin_capture", &RawDriver::begin_capture, py::arg("stream"), py::arg("mode") = 0, unlocked)
      .def("end_capture", &RawDriver::end_capture, py::arg("stream"), unlocked)
      .def("exchange_capture_mode", &RawDriver::exchange_capture_mode, py::arg("mode"), unlocked)
      .def("hold", &RawDriver::hold, py::arg("latch"), py::arg("stream"), unlocked)
      .def("call_inside_host_function", &RawDriver::call_inside_host_function, py::arg("stream"), unlocked)
      .def("event_create", &RawDriver::event_create, py::arg("flags") = 2, unlocked)
      .def("event_destroy", &RawDriver::event_destroy, py::arg("event"), unlocked)
      .def("event_record", &RawDriver::event_record, py::arg("event"), py::arg("stream"), unlocked)
      .def("event_query", &RawDriver::event_query, py::arg("event"), unlocked)
      .def("event_synchronize", &RawDriver::event_synchronize, py::arg("event"), unlocked)
      .def("graph_instantiate", &RawDriver::graph_instantiate, py::arg("graph"), py::arg("flags") = 0,
           unlocked)
      .def("graph_launch", &RawDriver::graph_launch, py::arg("executable"), py::arg("stream"), unlocked)
      .def("graph_exec_destroy", &RawDriver::graph_exec_destroy, py::arg("executable"), unlocked)
      .def("graph_destroy", &RawDriver::graph_destroy, py::arg("graph"), unlocked);
}

void bind_driver(py::module_& raw) {
  const WithoutGil unlocked;
  py::class_<RawDriver> driver(raw, "Driver",
                               "One provider's driver calls: a CUresult first, outputs behind it.");
  driver
      .def(py::init([](const std::string& name) { return new RawDriver(provider_of(name)); }),
           py::arg("provider"))
      .def("init", &RawDriver::init, py::arg("flags") = 0, unlocked)
      .def("driver_version", &RawDriver::driver_version, unlocked)
      .def("error_name", &RawDriver::error_name, py::arg("code"), unlocked)
      .def("error_string", &RawDriver::error_string, py::arg("code"), unlocked)
      .def("device_count", &RawDriver::device_count, unlocked)
      .def("device_get", &RawDriver::device_get, py::arg("ordinal"), unlocked)
      .def("device_name", &RawDriver::device_name, py::arg("device"), unlocked)
      .def("device_bus_id", &RawDriver::device_bus_id, py::arg("device"), py::arg("length") = 32, unlocked)
      .def("device_attribute", &RawDriver::device_attribute, py::arg("attribute"), py::arg("device"),
           unlocked)
      .def("device_total_mem", &RawDriver::device_total_mem, py::arg("device"), unlocked)
      .def("primary_retain", &RawDriver::primary_retain, py::arg("device"), unlocked)
      .def("primary_release", &RawDriver::primary_release, py::arg("device"), unlocked)
      .def("push", &RawDriver::push, py::arg("context"), unlocked)
      .def("pop", &RawDriver::pop, unlocked)
      .def("current", &RawDriver::current, unlocked)
      .def("ctx_synchronize", &RawDriver::ctx_synchronize, unlocked)
      .def("ctx_record_event", &RawDriver::ctx_record_event, py::arg("context"), py::arg("event"), unlocked)
      .def("ctx_wait_event", &RawDriver::ctx_wait_event, py::arg("context"), py::arg("event"), unlocked);
  bind_driver_memory(driver);
  bind_driver_streams(driver);
}

void bind_host_driver(py::module_& raw) {
  using host_driver::Counts;
  using host_driver::Settings;
  py::class_<Settings>(raw, "Settings")
      .def(py::init([](std::size_t memory_limit, std::uint64_t bandwidth, bool is_poisoned) {
             Settings settings;
             settings.memory_limit = memory_limit;
             settings.bandwidth = bandwidth;
             settings.is_poisoned = is_poisoned;
             return settings;
           }),
           py::arg("memory_limit") = 0, py::arg("bandwidth") = 0, py::arg("is_poisoned") = false)
      .def_readwrite("memory_limit", &Settings::memory_limit)
      .def_readwrite("bandwidth", &Settings::bandwidth)
      .def_readwrite("is_poisoned", &Settings::is_poisoned);
  py::class_<Counts>(raw, "Counts")
      .def_readonly("ranges", &Counts::ranges)
      .def_readonly("handles", &Counts::handles)
      .def_readonly("mappings", &Counts::mappings)
      .def_readonly("streams", &Counts::streams)
      .def_readonly("events", &Counts::events)
      .def_readonly("registrations", &Counts::registrations)
      .def_readonly("graphs", &Counts::graphs)
      .def_readonly("physical_bytes", &Counts::physical_bytes);
  raw.def("settings", &host_driver::settings, py::arg("device"), WithoutGil());
  raw.def("set_settings", &host_driver::set_settings, py::arg("device"), py::arg("settings"), WithoutGil());
  raw.def("counts", &host_driver::counts, WithoutGil());
  raw.def("clear_sticky_error", &host_driver::clear_sticky_error, py::arg("device"), WithoutGil());
  raw.def("is_accessible", &host_driver::is_accessible, py::arg("address"), py::arg("size"), WithoutGil());
  raw.attr("GRANULARITY") = host_driver::kGranularity;
  raw.attr("DEVICE_COUNT") = host_driver::kDeviceCount;
  raw.attr("POISON") = static_cast<int>(host_driver::kPoison);
}

// (name, symbol, since, is_required) of every call in the table.
std::vector<std::tuple<std::string, std::string, int, bool>> calls() {
  std::vector<std::tuple<std::string, std::string, int, bool>> all;
  for (std::size_t index = 0; index < driver::kCallCount; ++index) {
    const driver::CallInfo& info = driver::call_info(static_cast<driver::Call>(index));
    all.emplace_back(info.name, info.symbol, info.since, info.is_required());
  }
  return all;
}

}  // namespace

void bind_raw(py::module_& core) {
  py::module_ raw = core.def_submodule("raw", "The driver calls as they are, for tests.");
  bind_latch(raw);
  bind_driver(raw);
  bind_host_driver(raw);
  raw.def("calls", &calls);
  raw.def("find_call", [](const std::string& name) { return static_cast<int>(driver::find_call(name)); });
}

}  // namespace fencepool
