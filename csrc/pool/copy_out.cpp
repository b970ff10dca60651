#include "pool/copy_out.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/problems.h"
#include "digest/digest.h"
#include "pool/claims.h"
#include "pool/digest_pass.h"

namespace fencepool {
namespace {

using Piece = Pool::Claim::Piece;

// Of any number of zeros.
const digest::Digest& digest_of_zeros() {
  static const digest::Digest digest = digest::of(digest::process_key(), nullptr, 0);
  return digest;
}

// Cut where the segment's grid of blocks is, so that a block is the same one in every pause.
void cut_into_blocks(const Piece& run, std::vector<Piece>& blocks) {
  const std::size_t end = run.offset + run.size;
  for (std::size_t at = run.offset; at < end;) {
    const std::size_t next = std::min(end, (at / digest::kBlock + 1) * digest::kBlock);
    blocks.push_back({at, next - at, 0});
    at = next;
  }
}

// Where the block that was here at the last pause is stored.
std::optional<std::size_t> last_position(const Pool::Claim::Image& image, std::uint64_t segment,
                                         const Piece& block) {
  const auto pieces = image.find(segment);
  if (pieces == image.end()) return std::nullopt;
  const auto found =
      std::lower_bound(pieces->second.begin(), pieces->second.end(), block.offset,
                       [](const Piece& piece, std::size_t offset) { return piece.offset < offset; });
  const bool is_same = found != pieces->second.end() && found->offset == block.offset &&
                       found->size == block.size && found->position != Pool::Claim::kZeros;
  return is_same ? std::optional(found->position) : std::nullopt;
}

// Appends a copy, to the last one where it goes on there.
void append(std::vector<Piece>& copies, const Piece& piece) {
  if (!copies.empty()) {
    Piece& last = copies.back();
    if (last.offset + last.size == piece.offset && last.position + last.size == piece.position) {
      last.size += piece.size;
      return;
    }
  }
  copies.push_back({piece.offset, piece.size, piece.position});
}

}  // namespace

CopyOut::CopyOut(Pool::Claim& claim, const DeadBytes& dead, const Interrupt& interrupt)
    : claim_(claim), digest_memory_(claim), image_(claim.plan_image(dead)) {
  std::size_t wanted = 0;
  if (claim.has_digests()) {
    Stopwatch watch;
    place_by_digest(interrupt);
    seconds_digesting_ = watch.total();
    wanted = plan_->end();
  } else {
    claim.contents().clear();
    copies_ = image_;
    wanted = Pool::Claim::image_bytes(image_);
  }
  provision_ = std::make_unique<Provision>(claim.buffer(), wanted);
}

CopyOut::~CopyOut() {
  if (bytes_ == 0 || drain(claim_)) return;
  problems::record({claim_.pool().tag(), ": copies to the backup could not be awaited"});
  claim_.buffer().set_unsettled();
}

// Every block gets the place of an equal one that is stored already, or one of its own.
void CopyOut::place_by_digest(const Interrupt& interrupt) {
  Pool::Claim::Image blocks;
  DigestPass pass(claim_);
  for (const Segment* segment : claim_.segments()) {
    std::vector<Piece>& own = blocks[segment->serial];
    for (const Piece& run : image_.at(segment->serial)) cut_into_blocks(run, own);
    for (const Piece& block : own) pass.add(segment->range.address() + block.offset, block.size);
  }
  pass.submit();
  const digest::Digest* next = pass.wait(interrupt);

  // Whoever holds a view of the backup may have written to it.
  if (claim_.buffer().is_shared()) claim_.contents().clear();
  plan_ = std::make_unique<Contents::Plan>(claim_.contents());
  std::vector<std::pair<std::uint64_t, Piece*>> missing;
  for (auto& [segment, own] : blocks) {
    for (Piece& block : own) {
      block.digest = *next++;
      block.is_digested = true;
      if (block.digest == digest_of_zeros()) {
        block.position = Pool::Claim::kZeros;
      } else if (const auto position = plan_->find(block.digest, block.size)) {
        block.position = *position;
      } else {
        missing.emplace_back(segment, &block);
      }
    }
  }
  plan_->drop_unused();
  for (const auto& [segment, block] : missing) place(segment, *block);
  image_.swap(blocks);
}

void CopyOut::place(std::uint64_t segment, Piece& block) {
  if (const auto position = plan_->find(block.digest, block.size)) {  // an equal one came before
    block.position = *position;
    return;
  }
  block.position =
      plan_->add(block.digest, block.size, last_position(std::as_const(claim_).image(), segment, block));
  append(copies_[segment], block);
}

void CopyOut::start(const Interrupt& interrupt) {
  std::vector<Segment*> batch;
  std::size_t batch_bytes = 0;
  for (Segment* segment : claim_.segments()) {
    for (const Piece& piece : copies_[segment->serial]) {
      copy(segment->range.address(), piece, interrupt);
      batch_bytes += piece.size;
    }
    batch.push_back(segment);
    if (batch_bytes >= kBatch && provision_->bytes_added() == 0) {
      end_batch(batch);
      batch_bytes = 0;
    }
  }
  if (!batch.empty()) end_batch(batch);
}

void CopyOut::end_batch(std::vector<Segment*>& segments) {
  auto copied = std::make_shared<Event>(claim_.device());
  claim_.stream().record(*copied);
  batches_.push_back({std::exchange(segments, {}), std::move(copied)});
}

void CopyOut::keep(const Interrupt& interrupt) {
  provision_->keep(interrupt);
  claim_.set_image(std::move(image_));
}

void CopyOut::commit() noexcept {
  if (plan_ != nullptr) plan_->commit();
  digest_memory_.keep();
}

void CopyOut::copy(CUdeviceptr from, const Piece& piece, const Interrupt& interrupt) {
  const CUstream stream = claim_.stream().get();
  for (std::size_t done = 0; done < piece.size;) {
    const HostBuffer::Place place = claim_.buffer().place(piece.position + done, piece.size - done);
    Stopwatch watch;
    provision_->wait(place.chunk, interrupt);
    seconds_waited_ += watch.lap();
    claim_.device().driver().check<Call::cuMemcpyDtoHAsync>(static_cast<void*>(place.address),
                                                            from + piece.offset + done, place.size, stream);
    done += place.size;
    bytes_ += place.size;
  }
}

}  // namespace fencepool
