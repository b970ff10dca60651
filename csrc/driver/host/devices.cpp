#include "driver/host/devices.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

namespace fencepool::host_driver {
namespace {

// The number in the first line of a file, or "no limit" where there is none (no file, or the word "max").
std::size_t limit_in_file(const char* path) {
  std::ifstream file(path);
  std::size_t bytes = 0;
  return file >> bytes ? bytes : std::numeric_limits<std::size_t>::max();
}

// Memory of the machine, or of the control group (version 2 or 1) this process is confined to.
std::size_t machine_memory() {
  static const std::size_t bytes = [] {
    const auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES));
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE));
    return std::min({pages * page, limit_in_file("/sys/fs/cgroup/memory.max"),
                     limit_in_file("/sys/fs/cgroup/memory/memory.limit_in_bytes")});
  }();
  return bytes;
}

}  // namespace

Device& device_at(int ordinal) {
  // Never destroyed: stream threads use it until the process is gone.
  static auto* const devices = new std::array<Device, kDeviceCount>();
  return (*devices)[static_cast<std::size_t>(ordinal)];
}

Settings Device::settings() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return settings_;
}

void Device::set(const Settings& settings) {
  const std::lock_guard<std::mutex> lock(mutex_);
  settings_ = settings;
}

std::size_t Device::total_locked() const {
  return settings_.memory_limit != 0 ? settings_.memory_limit : machine_memory();
}

std::size_t Device::total() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return total_locked();
}

std::size_t Device::held() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_;
}

bool Device::try_hold(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t total = total_locked();
  if (held_ > total || bytes > total - held_) return false;
  held_ += bytes;
  return true;
}

void Device::give_back(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  held_ -= bytes;
}

Device::Clock::time_point Device::book(Direction direction, std::size_t bytes, Clock::time_point begin) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (settings_.bandwidth == 0) return begin;
  const std::chrono::duration<double> taken(static_cast<double>(bytes) /
                                            static_cast<double>(settings_.bandwidth));
  Clock::time_point& is_free = link_is_free_[static_cast<std::size_t>(direction)];
  is_free = std::max(is_free, begin) + std::chrono::duration_cast<Clock::duration>(taken);
  return is_free;
}

Settings settings(int device) { return is_device(device) ? device_at(device).settings() : Settings{}; }

void set_settings(int device, const Settings& settings) {
  if (is_device(device)) device_at(device).set(settings);
}

}  // namespace fencepool::host_driver
