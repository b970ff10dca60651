// The emulated devices: their settings, the memory they hold, and the link each has to the host.
#pragma once

#include <array>
#include <chrono>
#include <mutex>
#include <utility>

#include "driver/host/host_driver.h"

namespace fencepool::host_driver {

enum class Direction : int { kToDevice, kToHost };

// One emulated device. Thread-safe. Its lock is a leaf: nothing is called while it is held.
class Device {
 public:
  using Clock = std::chrono::steady_clock;

  Settings settings() const;
  void set(const Settings& settings);

  // Bytes of physical memory: the limit that is set, else the machine's.
  std::size_t total() const;
  std::size_t held() const;
  // Counts `bytes` as held; false, and nothing changed, when that would pass the limit.
  bool try_hold(std::size_t bytes);
  void give_back(std::size_t bytes);

  // Books `bytes` on the link, from `begin` on, behind what is booked; returns when they have passed.
  // All streams of the device share one link a direction, as they share one PCIe link.
  Clock::time_point book(Direction direction, std::size_t bytes, Clock::time_point begin);

 private:
  std::size_t total_locked() const;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Settings settings_;
  std::size_t held_ = 0;
  std::array<Clock::time_point, 2> link_is_free_{};
};

inline bool is_device(int ordinal) { return ordinal >= 0 && ordinal < kDeviceCount; }

// REQUIRES: is_device(ordinal). Devices live until the process ends.
Device& device_at(int ordinal);

// Owns a place in a device's account; gives it back when it dies.
class HeldMemory {
 public:
  HeldMemory() = default;  // holds nothing
  // REQUIRES: try_hold(bytes) of that device succeeded and nobody else answers for it.
  HeldMemory(int device, std::size_t bytes) : device_(device), bytes_(bytes) {}
  HeldMemory(HeldMemory&& other) noexcept : device_(other.device_), bytes_(std::exchange(other.bytes_, 0)) {}
  HeldMemory& operator=(HeldMemory&&) = delete;
  ~HeldMemory() {
    if (bytes_ != 0) device_at(device_).give_back(bytes_);
  }

 private:
  int device_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace fencepool::host_driver
