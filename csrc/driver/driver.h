// A driver in use: its table, what it lacks, and the faults a test injects.
#pragma once

#include <string>
#include <vector>

#include "base/allocation_faults.h"
#include "base/error.h"
#include "base/faults.h"
#include "driver/table.h"

namespace fencepool::driver {

enum class Provider { kCuda, kHost };

template <Call C>
struct Entry;
#define FENCEPOOL_MEMBER(name, since)             \
  template <>                                     \
  struct Entry<Call::name> {                      \
    static constexpr auto kMember = &Table::name; \
  };
FENCEPOOL_DRIVER_CALLS(FENCEPOOL_MEMBER)
#undef FENCEPOOL_MEMBER

class Driver {
 public:
  // The driver of that provider, opened on first use and kept. Thread-safe.
  // Throws Error(kUnavailable) that says what is missing, at every call until it works.
  static Driver& get(Provider provider);
  // Empty when get() would succeed, else the reason.
  static std::string why_unavailable(Provider provider);

  // Calls the driver and returns its status as it is. A call this driver lacks gives
  // CUDA_ERROR_NOT_SUPPORTED. Never throws.
  template <Call C, class... Arguments>
  CUresult call(Arguments... arguments) noexcept {
    CUresult injected = CUDA_SUCCESS;
    if (faults.take(C, &injected)) return injected;
    const allocation_faults::Exempt exempt;
    const auto entry = table_.*Entry<C>::kMember;
    return entry == nullptr ? CUDA_ERROR_NOT_SUPPORTED : entry(arguments...);
  }

  // The same, but a failure is thrown as an Error that names the call.
  template <Call C, class... Arguments>
  void check(Arguments... arguments) {
    const CUresult status = call<C>(arguments...);
    if (status != CUDA_SUCCESS) throw failure(C, status);
  }

  template <Call C>
  bool has() const {
    return table_.*Entry<C>::kMember != nullptr;
  }
  std::vector<std::string> absent_calls() const;

  // The Error for a failed call: kOutOfMemory or kDriver, with the driver's own words.
  Error failure(Call call, CUresult status) const;
  // "cuMemMap failed: CUDA_ERROR_INVALID_VALUE (invalid argument)".
  std::string describe(Call call, CUresult status) const;
  std::string status_name(CUresult status) const;

  Provider provider() const { return provider_; }
  int version() const { return version_; }
  int device_count() const { return device_count_; }

  Faults<Call, CUresult> faults;

 private:
  explicit Driver(Provider provider) : provider_(provider) {}
  std::string open();

  Provider provider_;
  Table table_;
  int version_ = 0;
  int device_count_ = 0;
};

}  // namespace fencepool::driver

namespace fencepool {
using driver::Call;
using driver::Driver;
using driver::Provider;
}  // namespace fencepool
