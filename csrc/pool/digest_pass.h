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

  // One block more: [address, address + size), both multiples of digest::kUnit; at most digest::kBlock.
  // Blocks that follow each other on the grid become one run.
  void add(CUdeviceptr address, std::size_t size);
  // Submits the kernels to the pool's stream, behind what is there. Needs a Device::Scope.
  void submit();
  // Waits for them. One digest for each block, in the order they were added; valid until the next pass of the
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
