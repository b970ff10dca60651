// The digests of a pool's bytes, taken by its device.
#pragma once

#include <memory>
#include <vector>

#include "digest/format.h"
#include "pool/claim.h"

namespace fencepool {

// Until it has been awaited, its death ends the work it submitted.
class DigestPass {
 public:
  explicit DigestPass(Pool::Claim& claim) : claim_(claim) {}
  ~DigestPass();
  DigestPass(const DigestPass&) = delete;
  DigestPass& operator=(const DigestPass&) = delete;

  // A run more, `offset` bytes into its segment: it counts as blocks that end where the segment's grid has
  // its lines. All three are multiples of digest::kUnit.
  void add(CUdeviceptr address, std::size_t offset, std::size_t size);
  // Submits the kernels to the pool's stream, behind what is there. Needs a Device::Scope.
  void submit();
  // Waits for them. One digest for each block, in the order of the runs; valid until the next pass of the
  // pool. Throws what the device failed with.
  const digest::Digest* wait(const Interrupt& interrupt);

 private:
  Pool::Claim& claim_;
  std::vector<digest::Run> runs_;
  std::size_t blocks_ = 0;
  bool is_running_ = false;
  std::unique_ptr<Event> done_;
};

}  // namespace fencepool
