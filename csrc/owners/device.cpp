#include "owners/device.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <map>

#include "base/problems.h"
#include "base/process.h"

namespace fencepool {
namespace {

struct Devices {
  Mutex mutex;
  std::map<int, Device*> by_ordinal GUARDED_BY(mutex);
};

Devices& devices_of(Provider provider) {
  static Devices& cuda = *new Devices;
  static Devices& host = *new Devices;
  return provider == Provider::kCuda ? cuda : host;
}

std::string device_name(Provider provider, int ordinal) {
  if (provider == Provider::kCuda) return "cuda:" + std::to_string(ordinal);
  return ordinal == 0 ? "cpu" : "cpu:" + std::to_string(ordinal);
}

// The NUMA node the kernel gives for a PCI device; -1 when it gives none.
int numa_node_of_pci(std::string bus_id) {
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  int node = -1;
  std::ifstream("/sys/bus/pci/devices/" + bus_id + "/numa_node") >> node;
  return node;
}

}  // namespace

Device& Device::get(Provider provider, int ordinal) {
  Driver& driver = Driver::get(provider);
  if (ordinal < 0 || ordinal >= driver.device_count()) {
    throw Error(Kind::kInvalid, "there is no device " + device_name(provider, ordinal) + "; the driver has " +
                                    std::to_string(driver.device_count()));
  }
  Devices& devices = devices_of(provider);
  const Lock lock(devices.mutex);
  Device*& slot = devices.by_ordinal[ordinal];
  if (slot == nullptr) slot = new Device(driver, ordinal);
  return *slot;
}

Device::Device(Driver& driver, int ordinal)
    : driver_(driver), ordinal_(ordinal), name_(device_name(driver.provider(), ordinal)) {
  driver_.check<Call::cuDeviceGet>(&device_, ordinal);
  if (attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) {
    throw Error(Kind::kUnavailable, name_ +
                                        " has no virtual memory management, which fencepool is built on; "
                                        "`python -m fencepool doctor` says what this machine supports");
  }
  const CUmemAllocationProp wanted = properties();
  driver_.check<Call::cuMemGetAllocationGranularity>(&granularity_, &wanted,
                                                     CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  driver_.check<Call::cuDevicePrimaryCtxRetain>(&context_, device_);
  int node = -1;
  if (driver_.call<Call::cuDeviceGetAttribute>(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device_) ==
          CUDA_SUCCESS &&
      node >= 0) {
    numa_node_ = node;
  } else if (std::array<char, 32> bus{};
             driver_.call<Call::cuDeviceGetPCIBusId>(bus.data(), static_cast<int>(bus.size()), device_) ==
             CUDA_SUCCESS) {
    numa_node_ = numa_node_of_pci(bus.data());
  }
}

Device::Scope::Scope(Device& device) : driver_(device.driver_) {
  process::require_owner();
  CUcontext current = nullptr;
  const bool is_known = driver_.call<Call::cuCtxGetCurrent>(&current) == CUDA_SUCCESS;
  if (!is_known || current != device.context_) {
    driver_.check<Call::cuCtxPushCurrent>(device.context_);
    is_pushed_ = true;
  }
  is_mode_changed_ = driver_.call<Call::cuThreadExchangeStreamCaptureMode>(&mode_) == CUDA_SUCCESS;
}

Device::Scope::~Scope() {
  if (process::is_forked_child()) return;
  // Undoing may not fail: each call is tried once more before it is given up.
  if (is_mode_changed_ && driver_.call<Call::cuThreadExchangeStreamCaptureMode>(&mode_) != CUDA_SUCCESS &&
      driver_.call<Call::cuThreadExchangeStreamCaptureMode>(&mode_) != CUDA_SUCCESS) {
    problems::record({"cuThreadExchangeStreamCaptureMode failed; this thread stays in relaxed capture mode"});
  }
  if (!is_pushed_) return;
  CUcontext popped = nullptr;
  if (driver_.call<Call::cuCtxPopCurrent>(&popped) != CUDA_SUCCESS &&
      driver_.call<Call::cuCtxPopCurrent>(&popped) != CUDA_SUCCESS) {
    problems::record({"cuCtxPopCurrent failed; the device's context stays current on this thread"});
  }
}

void Device::watch_streams(const std::vector<CUstream>& streams) {
  const Lock lock(mutex_);
  for (const CUstream stream : streams) {
    if (std::find(watched_.begin(), watched_.end(), stream) == watched_.end()) watched_.push_back(stream);
  }
}

bool is_capturing(Driver& driver, CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = driver.call<Call::cuStreamIsCapturing>(stream, &status);
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
  if (result != CUDA_SUCCESS) throw driver.failure(Call::cuStreamIsCapturing, result);
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

bool Device::is_capturing(const std::vector<CUstream>& more) {
  std::vector<CUstream> streams = more;
  streams.push_back(nullptr);
  {
    const Lock lock(mutex_);
    streams.insert(streams.end(), watched_.begin(), watched_.end());
  }
  return std::any_of(streams.begin(), streams.end(),
                     [this](CUstream stream) { return fencepool::is_capturing(driver_, stream); });
}

DeviceMemory Device::memory() {
  DeviceMemory memory;
  driver_.check<Call::cuMemGetInfo>(&memory.free, &memory.total);
  return memory;
}

int Device::attribute(CUdevice_attribute which) const {
  int value = 0;
  return driver_.call<Call::cuDeviceGetAttribute>(&value, which, device_) == CUDA_SUCCESS ? value : 0;
}

CUmemAllocationProp Device::properties(Where where) const {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  const bool is_host = where == Where::kHost;
  wanted.location.type = is_host ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE;
  // Without NUMA the node is 0 (CUDA Driver API, cuMemCreate).
  wanted.location.id = is_host ? std::max(numa_node_, 0) : ordinal_;
  return wanted;
}

Device::Accesses Device::accesses(Where where) const {
  Accesses granted;
  granted.who[0] = {properties().location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  granted.who[1] = {properties(Where::kHost).location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  granted.count = where == Where::kHost ? 2 : 1;
  return granted;
}

std::string Device::why_no_host_memory() const {
  if (attribute(CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) {
    return "the driver does not put host memory at this device's addresses (it takes CUDA 12.2 or newer, and "
           "a GPU "
           "that can)";
  }
  const CUmemAllocationProp wanted = properties(Where::kHost);
  std::size_t granularity = 0;
  const CUresult status = driver_.call<Call::cuMemGetAllocationGranularity>(&granularity, &wanted,
                                                                            CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (status != CUDA_SUCCESS) return driver_.describe(Call::cuMemGetAllocationGranularity, status);
  if (granularity == 0 || granularity_ % granularity != 0) {
    return "its host memory comes in steps of " + format_bytes(granularity) + ", its own in steps of " +
           format_bytes(granularity_);
  }
  return "";
}

}  // namespace fencepool
