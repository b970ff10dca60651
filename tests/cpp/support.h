// Pools of the embedded driver for the C++ tests.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "driver/host/host_driver.h"
#include "pool/registry.h"
#include "pool/transition.h"

namespace fencepool::testing {

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

inline Device& device(int ordinal = 0) { return Device::get(Provider::kHost, ordinal); }

// A pool that no other test has.
inline std::shared_ptr<Pool> new_pool(Backup backup, int ordinal = 0, Digests digests = Digests::kAvailable) {
  static std::atomic<int> number{0};
  Policy policy;
  policy.backup = backup;
  policy.digests = digests;
  return registry::get_pool(device(ordinal), "pool-" + std::to_string(++number), policy);
}

inline void fill(const Block& block, unsigned char value) {
  std::memset(reinterpret_cast<void*>(block.address()), value, block.size());
}

inline bool holds(const Block& block, unsigned char value) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(block.address());
  for (std::size_t i = 0; i < block.size(); i += 509) {
    if (bytes[i] != value) return false;
  }
  return bytes[block.size() - 1] == value;
}

inline TransitionReport pause_pools(std::vector<std::shared_ptr<Pool>> pools) {
  return pause(std::move(pools), PauseOptions{});
}

// The host waits for the restore, as whoever reads on the CPU must.
inline TransitionReport resume_pools(std::vector<std::shared_ptr<Pool>> pools, double wait = 0) {
  ResumeOptions options;
  options.wait = wait;
  options.is_host_held = true;
  return resume(std::move(pools), options);
}

// Changes the emulated machine for as long as it lives.
class WithSettings {
 public:
  explicit WithSettings(host_driver::Settings settings, int ordinal = 0)
      : ordinal_(ordinal), before_(host_driver::settings(ordinal)) {
    host_driver::set_settings(ordinal, settings);
  }
  ~WithSettings() { host_driver::set_settings(ordinal_, before_); }
  WithSettings(const WithSettings&) = delete;
  WithSettings& operator=(const WithSettings&) = delete;

 private:
  int ordinal_;
  host_driver::Settings before_;
};

}  // namespace fencepool::testing
