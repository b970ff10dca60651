#include "pool/digest_pass.h"

#include <algorithm>

#include "base/problems.h"
#include "digest/digest.h"
#include "owners/launch.h"

namespace fencepool {

DigestPass::~DigestPass() {
  if (!is_running_ || drain(claim_)) return;
  problems::record({claim_.pool().tag(), ": digests could not be awaited; a little host memory leaks"});
  claim_.leak_digests();
}

void DigestPass::add(CUdeviceptr address, std::size_t offset, std::size_t size) {
  const std::size_t to_line = digest::kBlock - offset % digest::kBlock;
  const auto head = static_cast<std::uint32_t>(std::min(size, to_line));
  runs_.push_back({address, size, head, 0});
  blocks_ += digest::blocks_in(size, head);
}

void DigestPass::submit() {
  if (runs_.empty()) return;
  Device& device = claim_.device();
  const CUdeviceptr output = claim_.digest_memory(blocks_ * sizeof(digest::Digest));
  done_ = std::make_unique<Event>(device);
  auto launch = std::make_unique<digest::Launch>();
  launch->key = digest::process_key();
  std::size_t first = 0;
  is_running_ = true;
  for (std::size_t next = 0; next < runs_.size(); next += launch->runs) {
    launch->output = output + first * sizeof(digest::Digest);
    launch->blocks = 0;
    launch->runs = static_cast<std::uint32_t>(std::min<std::size_t>(digest::kMostRuns, runs_.size() - next));
    for (std::uint32_t i = 0; i < launch->runs; ++i) {
      digest::Run& run = launch->run[i];
      run = runs_[next + i];
      run.first_block = launch->blocks;
      launch->blocks += static_cast<std::uint32_t>(digest::blocks_in(run.bytes, run.head));
    }
    launch_digests(device, device.digest_kernel(), *launch, claim_.stream());
    first += launch->blocks;
  }
  claim_.stream().record(*done_);
}

const digest::Digest* DigestPass::wait(const Interrupt& interrupt) {
  if (runs_.empty()) return nullptr;
  static_cast<void>(wait_for(*done_, -1, interrupt));
  is_running_ = false;
  return claim_.digests();
}

}  // namespace fencepool
