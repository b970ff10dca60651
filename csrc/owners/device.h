// A device in use: its primary context (the one PyTorch uses too), and what is known of it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "driver/driver.h"

namespace fencepool {

struct DeviceMemory {
  std::size_t free = 0;   // bytes
  std::size_t total = 0;  // bytes
};

// Whose memory it is: the device's, or the host's, on the NUMA node nearest to the device.
enum class Where { kDevice, kHost };

// Whether the stream is being captured into a CUDA graph; for the default stream, whether a stream that
// synchronises with it is. Needs a Device::Scope. CUDA Driver API, cuStreamIsCapturing.
bool is_capturing(Driver& driver, CUstream stream);

class Device {
 public:
  // The device of that ordinal; its primary context is retained and never released, since pools
  // and their tensors may outlive everything else. Thread-safe. Throws kUnavailable or kInvalid.
  static Device& get(Provider provider, int ordinal);

  // While it lives, the device's context is current on this thread (pushed unless it was), and this thread's
  // calls do not break another thread's CUDA-graph capture (CUDA Driver API,
  // cuThreadExchangeStreamCaptureMode).
  class Scope {
   public:
    explicit Scope(Device& device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Driver& driver_;
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool is_pushed_ = false;
    bool is_mode_changed_ = false;
  };

  // Streams that live as long as the process (PyTorch's stream pool) and may be capturing.
  void watch_streams(const std::vector<CUstream>& streams) EXCLUDES(mutex_);
  // Whether a watched stream, the default stream or one of `more` is being captured. A context-wide
  // record or wait would break such a capture, so this is asked first. Needs a Scope.
  bool is_capturing(const std::vector<CUstream>& more = {}) EXCLUDES(mutex_);

  DeviceMemory memory();  // as the driver reports it. Needs a Scope.
  // Bytes that pools leave free on the device: an allocation that would leave less is refused, a resume
  // is not. 0 at first.
  void set_margin(std::size_t bytes) noexcept { margin_ = bytes; }
  std::size_t margin() const noexcept { return margin_; }
  int attribute(CUdevice_attribute attribute) const;  // 0 when the driver does not know it

  // Makes fencepool's kernels ready on this device. Returns what stands in the way, empty when nothing does.
  // To be called while memory is at hand: the driver takes some for them. Thread-safe. kernels.cpp.
  std::string load_kernels() EXCLUDES(loading_mutex_);
  CUfunction digest_kernel() const noexcept { return digest_kernel_; }  // null: not loaded

  Driver& driver() const { return driver_; }
  CUcontext context() const { return context_; }
  int ordinal() const { return ordinal_; }
  std::size_t granularity() const { return granularity_; }
  int numa_node() const { return numa_node_; }       // of the host memory nearest to it, -1: unknown
  const std::string& name() const { return name_; }  // "cuda:0", "cpu", "cpu:1"
  bool is_host() const { return driver_.provider() == Provider::kHost; }
  CUmemAllocationProp properties(Where where = Where::kDevice) const;
  // Who may read and write such memory: the device, and the processor where it is the host's. CUDA Driver
  // API, cuMemSetAccess: no other memory may name the host.
  struct Accesses {
    std::array<CUmemAccessDesc, 2> who{};
    std::size_t count = 1;
  };
  Accesses accesses(Where where) const;
  // Why host memory cannot stand at this device's addresses; empty when it can.
  std::string why_no_host_memory() const;

 private:
  Device(Driver& driver, int ordinal);

  Driver& driver_;
  int ordinal_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  std::size_t granularity_ = 0;
  int numa_node_ = -1;
  std::string name_;
  Mutex loading_mutex_;  // held while kernels are loaded
  Mutex mutex_;
  std::vector<CUstream> watched_ GUARDED_BY(mutex_);
  std::atomic<std::size_t> margin_{0};
  std::atomic<CUfunction> digest_kernel_{nullptr};
};

// Scopes of several devices at once, ended in reverse order.
class Scopes {
 public:
  explicit Scopes(const std::vector<Device*>& devices) {
    try {
      for (Device* device : devices) scopes_.push_back(std::make_unique<Device::Scope>(*device));
    } catch (...) {
      end();
      throw;
    }
  }
  ~Scopes() { end(); }
  Scopes(const Scopes&) = delete;
  Scopes& operator=(const Scopes&) = delete;

 private:
  void end() noexcept {
    while (!scopes_.empty()) scopes_.pop_back();
  }

  std::vector<std::unique_ptr<Device::Scope>> scopes_;
};

// Unless it is there already.
inline void add_once(std::vector<Device*>& devices, Device& device) {
  if (std::find(devices.begin(), devices.end(), &device) == devices.end()) devices.push_back(&device);
}

}  // namespace fencepool
