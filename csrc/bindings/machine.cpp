// The drivers and devices, and the faults that tests inject.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "base/allocation_faults.h"
#include "base/host_budget.h"
#include "base/host_memory.h"
#include "base/process.h"
#include "base/system_calls.h"
#include "bindings/bindings.h"
#include "bindings/unlocked.h"
#include "owners/device.h"

namespace py = pybind11;

namespace fencepool {
namespace {

// Asked of the driver without making a context, so that looking at a GPU takes none of its memory.
py::dict device_dict(Driver& driver, int ordinal) {
  static constexpr std::array<std::pair<const char*, CUdevice_attribute>, 9> kAttributes{{
      {"vmm", CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
      {"rdma_vmm", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED},
      {"host_numa_vmm", CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
      {"posix_fd", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED},
      {"compute_major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
      {"compute_minor", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
      {"host_numa_id", CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID},
      {"async_engines", CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT},
      {"multiprocessors", CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
  }};
  CUdevice device = 0;
  driver.check<Call::cuDeviceGet>(&device, ordinal);
  std::array<char, 256> name{};
  driver.check<Call::cuDeviceGetName>(name.data(), static_cast<int>(name.size()), device);
  std::size_t total = 0;
  driver.check<Call::cuDeviceTotalMem>(&total, device);
  py::dict attributes;
  for (const auto& [key, attribute] : kAttributes) {
    int value = 0;
    if (driver.call<Call::cuDeviceGetAttribute>(&value, attribute, device) == CUDA_SUCCESS)
      attributes[key] = value;
  }
  py::dict dict;
  dict["ordinal"] = ordinal;
  dict["name"] = name.data();
  dict["total_bytes"] = total;
  dict["attributes"] = attributes;
  return dict;
}

py::dict driver_dict(const std::string& provider_name) {
  const Provider provider = provider_of(provider_name);
  py::dict dict;
  dict["reason"] = Driver::why_unavailable(provider);
  dict["version"] = 0;
  dict["absent_calls"] = py::list();
  py::list devices;
  if (dict["reason"].cast<std::string>().empty()) {
    Driver& driver = Driver::get(provider);
    dict["version"] = driver.version();
    dict["absent_calls"] = driver.absent_calls();
    for (int ordinal = 0; ordinal < driver.device_count(); ++ordinal)
      devices.append(device_dict(driver, ordinal));
  }
  dict["devices"] = devices;
  return dict;
}

Call call_of(const std::string& name) {
  if (name == "*") return Call::kCount;
  const Call call = driver::find_call(name);
  if (call == Call::kCount) throw Error(Kind::kInvalid, "the driver table has no call '" + name + "'");
  return call;
}

sys::Call system_call_of(const std::string& name) {
  if (name == "*") return sys::Call::kCount;
  const sys::Call call = sys::find_call(name);
  if (call == sys::Call::kCount) throw Error(Kind::kInvalid, "there is no system call '" + name + "' here");
  return call;
}

constexpr const char* kSystem = "system";

// For tests, see base/faults.h: of a driver's table, or of the system calls under the name "system".
void bind_faults(py::module_& module) {
  module.def(
      "arm_fault",
      [](const std::string& seam, const std::string& call, std::uint64_t nth, bool is_lasting, int code) {
        if (seam == kSystem) return sys::faults().arm(system_call_of(call), nth, is_lasting, code);
        Driver::get(provider_of(seam))
            .faults.arm(call_of(call), nth, is_lasting, static_cast<CUresult>(code));
      },
      py::arg("seam"), py::arg("call"), py::arg("nth"), py::arg("lasting"), py::arg("code"));
  module.attr("HAS_ALLOCATION_FAULTS") = allocation_faults::kIsThere;
  module.def("arm_allocation_fault", &allocation_faults::arm, py::arg("nth"), py::arg("lasting"));
  module.def("disarm_allocation_fault", &allocation_faults::disarm);
  module.def(
      "disarm_fault",
      [](const std::string& seam) {
        if (seam == kSystem) return sys::faults().disarm();
        Driver::get(provider_of(seam)).faults.disarm();
      },
      py::arg("seam"));
  module.def(
      "injected_faults",
      [](const std::string& seam) {
        return seam == kSystem ? sys::faults().injected() : Driver::get(provider_of(seam)).faults.injected();
      },
      py::arg("seam"));
  module.def(
      "call_counts",
      [](const std::string& seam) {
        py::dict counts;
        if (seam == kSystem) {
          for (int i = 0; i < static_cast<int>(sys::Call::kCount); ++i) {
            const auto call = static_cast<sys::Call>(i);
            counts[sys::name_of(call)] = sys::faults().count(call);
          }
          return counts;
        }
        const Driver& driver = Driver::get(provider_of(seam));
        for (std::size_t i = 0; i < driver::kCallCount; ++i) {
          counts[driver::call_info(static_cast<Call>(i)).name] = driver.faults.count(static_cast<Call>(i));
        }
        return counts;
      },
      py::arg("seam"));
}

}  // namespace

void bind_machine(py::module_& module) {
  module.def("driver_info", &driver_dict, py::arg("provider"));
  module.def(
      "memory_info",
      [](const std::string& provider, int ordinal) {
        Device& device = Device::get(provider_of(provider), ordinal);
        const Device::Scope scope(device);
        const DeviceMemory memory = device.memory();
        return std::make_pair(memory.free, memory.total);
      },
      py::arg("provider"), py::arg("ordinal"), py::call_guard<Unlocked>());
  module.def(
      "set_memory_margin",
      [](const std::string& provider, int ordinal, std::size_t bytes) {
        Device::get(provider_of(provider), ordinal).set_margin(bytes);
      },
      py::arg("provider"), py::arg("ordinal"), py::arg("margin"));
  module.def(
      "memory_margin",
      [](const std::string& provider, int ordinal) {
        return Device::get(provider_of(provider), ordinal).margin();
      },
      py::arg("provider"), py::arg("ordinal"));
  module.def(
      "watch_streams",
      [](const std::string& provider, int ordinal, const std::vector<std::uintptr_t>& handles) {
        Device::get(provider_of(provider), ordinal).watch_streams(streams_at(handles));
      },
      py::arg("provider"), py::arg("ordinal"), py::arg("handles"));
  module.def(
      "is_capturing",
      [](const std::string& provider, int ordinal, const std::vector<std::uintptr_t>& handles) {
        Device& device = Device::get(provider_of(provider), ordinal);
        const Device::Scope scope(device);
        return device.is_capturing(streams_at(handles));
      },
      py::arg("provider"), py::arg("ordinal"), py::arg("streams"), py::call_guard<Unlocked>());
  module.def("available_host_memory", &host_memory::available);
  module.def("set_host_budget", &host_budget::set, py::arg("nbytes"));
  module.def("host_budget", &host_budget::get);
  module.def("host_memory_used", &host_budget::used);
  module.def("parse_bytes", &host_budget::parse, py::arg("text"), py::arg("what"));
  module.def("is_forked_child", &process::is_forked_child);
  module.def("require_owner", &process::require_owner);

  bind_faults(module);
}

}  // namespace fencepool
