#include "driver/driver.h"

#include "base/process.h"

namespace fencepool::driver {
namespace {

struct Slot {
  Mutex mutex;
  Driver* driver GUARDED_BY(mutex) = nullptr;  // never deleted: it serves until the process ends
};

Slot& slot_of(Provider provider) {
  static Slot& cuda = *new Slot;
  static Slot& host = *new Slot;
  return provider == Provider::kCuda ? cuda : host;
}

}  // namespace

std::string Driver::open() {
  if (provider_ == Provider::kCuda) {
    std::string reason = fill_from_cuda(table_);
    if (!reason.empty()) return reason;
  } else {
    fill_from_host(table_);
  }
  if (const CUresult status = call<Call::cuInit>(0U); status != CUDA_SUCCESS)
    return describe(Call::cuInit, status);
  if (const CUresult status = call<Call::cuDriverGetVersion>(&version_); status != CUDA_SUCCESS) {
    return describe(Call::cuDriverGetVersion, status);
  }
  if (const CUresult status = call<Call::cuDeviceGetCount>(&device_count_); status != CUDA_SUCCESS) {
    return describe(Call::cuDeviceGetCount, status);
  }
  return device_count_ > 0 ? "" : "the driver reports no device";
}

std::string Driver::why_unavailable(Provider provider) {
  process::watch_forks();
  process::require_owner();
  Slot& slot = slot_of(provider);
  const Lock lock(slot.mutex);
  if (slot.driver != nullptr) return "";
  auto* candidate = new Driver(provider);
  std::string reason = candidate->open();
  if (reason.empty()) {
    slot.driver = candidate;
  } else {
    delete candidate;
  }
  return reason;
}

Driver& Driver::get(Provider provider) {
  const std::string reason = why_unavailable(provider);
  if (!reason.empty()) {
    const bool is_cuda = provider == Provider::kCuda;
    throw Error(Kind::kUnavailable,
                (is_cuda ? "the CUDA driver cannot be used: " : "the embedded driver cannot be used: ") +
                    reason +
                    (is_cuda ? ". `fencepool doctor` looks into it; device=\"cpu\" needs no GPU" : ""));
  }
  Slot& slot = slot_of(provider);
  const Lock lock(slot.mutex);
  return *slot.driver;
}

std::vector<std::string> Driver::absent_calls() const {
  std::vector<std::string> names;
#define FENCEPOOL_ABSENT(entry, since) \
  if (table_.entry == nullptr) names.emplace_back(call_info(Call::entry).name);
  FENCEPOOL_DRIVER_CALLS(FENCEPOOL_ABSENT)
#undef FENCEPOOL_ABSENT
  return names;
}

std::string Driver::status_name(CUresult status) const {
  const char* name = nullptr;
  if (table_.cuGetErrorName == nullptr || table_.cuGetErrorName(status, &name) != CUDA_SUCCESS ||
      name == nullptr) {
    return "CUresult " + std::to_string(static_cast<int>(status));
  }
  return name;
}

std::string Driver::describe(Call call, CUresult status) const {
  const char* words = nullptr;
  std::string text = std::string(call_info(call).name) + " failed: " + status_name(status);
  if (table_.cuGetErrorString != nullptr && table_.cuGetErrorString(status, &words) == CUDA_SUCCESS &&
      words != nullptr) {
    text += std::string(" (") + words + ")";
  }
  return text;
}

Error Driver::failure(Call call, CUresult status) const {
  Error error(status == CUDA_ERROR_OUT_OF_MEMORY ? Kind::kOutOfMemory : Kind::kDriver,
              describe(call, status));
  error.call = call_info(call).name;
  error.code = static_cast<int>(status);
  error.status = status_name(status);
  return error;
}

}  // namespace fencepool::driver
