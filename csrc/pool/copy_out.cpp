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

// Gaps between what stays add up, where what comes later is too large for them. Whether they are why the
// backup would have to grow: then it costs less to copy everything anew, one after the other.
bool is_scattered(const Image& blocks, std::size_t end, const Pool::Claim& claim) {
  if (end <= claim.capacity()) return false;
  const std::size_t gaps = end - bytes_stored(blocks, claim.step());
  return gaps > 0 &&
         (gaps > end / 8 || (!claim.is_on_disk() && !host_budget::allows(end - claim.capacity())));
}

}  // namespace

CopyOut::CopyOut(Pool::Claim& claim, const DeadBytes& dead, const Interrupt& interrupt)
    : claim_(claim),
      digest_memory_(claim),
      disk_space_(claim),
      is_exposed_(claim.buffer().is_shared()),
      image_(claim.plan_image(dead)) {
  if (claim.is_resident()) {
    copies_ = image_;
    return;
  }
  if (claim.is_on_disk()) DiskFile::check(claim.disk().file.directory());
  if (claim.has_digests()) {
    Stopwatch watch;
    place_by_digest(interrupt);
    seconds_digesting_ = watch.total();
  } else {
    copies_ = image_;
    wanted_ = end_of(image_, claim.step());
  }
}

std::size_t CopyOut::bytes_missing() const {
  if (claim_.is_resident()) return StandIns::bytes_missing(claim_);
  if (claim_.is_on_disk()) {  // a buffer to begin with
    return bytes_of(copies_) == 0 || claim_.disk().staging->has_any() ? 0 : Staging::kBuffer;
  }
  return wanted_ - std::min(wanted_, claim_.buffer().capacity());
}

std::size_t CopyOut::reserve() {
  if (!claim_.is_on_disk()) return 0;
  const std::size_t before = claim_.capacity();
  return claim_.disk().file.grow(wanted_) ? 0 : wanted_ - before;
}

CopyOut::~CopyOut() {
  if (bytes_ == 0 || claim_.is_on_disk() || drain(claim_)) return;
  problems::record({claim_.pool().tag(), ": copies to the backup could not be awaited"});
  claim_.buffer().set_unsettled();
}

void CopyOut::place_by_digest(const Interrupt& interrupt) {
  DigestPass pass(claim_);
  for (const Segment* segment : claim_.segments()) {
    for (const Piece& run : image_.at(segment->serial)) {
      pass.add(segment->range.address() + run.offset, run.offset, run.size);
    }
  }
  pass.submit();
  Image blocks;  // made while the device is at work
  for (const auto& [segment, runs] : image_) {
    for (const Piece& run : runs) cut_into_blocks(run, blocks[segment]);
  }
  const digest::Digest* next = pass.wait(interrupt);
  for (auto& [segment, own] : blocks) {
    for (Piece& block : own) {
      block.digest = *next++;
      block.is_digested = true;
    }
  }
  if (is_exposed_) claim_.set_stored(false);
  Placed placed = place_blocks(blocks, claim_.stored(), digest_of_zeros(), claim_.step());
  if (is_scattered(blocks, placed.end, claim_)) {
    placed = place_blocks(blocks, nullptr, digest_of_zeros(), claim_.step());
  }
  image_.swap(blocks);
  copies_.swap(placed.copies);
  wanted_ = placed.end;
}

void CopyOut::start(const Interrupt& interrupt) {
  if (claim_.is_on_disk()) return write_to_disk(interrupt);
  if (claim_.is_resident()) {
    Stopwatch watch;
    stand_ins_ = std::make_unique<StandIns>(claim_, interrupt);
    seconds_waited_ += watch.total();
  } else {
    provision_ = std::make_unique<Provision>(claim_.buffer(), wanted_);
  }
  if (!copies_.empty()) claim_.set_stored(false);  // from here on it is being overwritten
  std::vector<Segment*> batch;
  std::size_t batch_bytes = 0;
  for (Segment* segment : claim_.segments()) {
    for (const Piece& piece : copies_[segment->serial]) {
      if (stand_ins_ != nullptr) {
        copy_to_stand_in(*segment, piece);
      } else {
        copy(segment->range.address(), piece, interrupt);
      }
      batch_bytes += piece.size;
    }
    batch.push_back(segment);
    if (batch_bytes >= kBatch && (provision_ == nullptr || provision_->bytes_added() == 0)) {
      end_batch(batch);
      batch_bytes = 0;
    }
  }
  if (!batch.empty()) end_batch(batch);
}

// All of it, before anything is given away: releasing is short beside a disk, and what may still fail by then
// has not.
void CopyOut::write_to_disk(const Interrupt& interrupt) {
  if (bytes_of(copies_) > 0) claim_.set_stored(false);  // from here on it is being overwritten
  DiskPlan plan(claim_.step(), Staging::kBuffer);
  std::vector<Segment*> segments = claim_.segments();
  for (const Segment* segment : segments) {
    for (const Piece& piece : copies_[segment->serial]) plan.add(*segment, piece);
  }
  DiskOut out(claim_, plan.take(), interrupt);
  out.run();
  bytes_ = out.bytes();
  if (!segments.empty()) end_batch(segments);
}

void CopyOut::end_batch(std::vector<Segment*>& segments) {
  auto copied = std::make_shared<Event>(claim_.device());
  claim_.stream().record(*copied);
  batches_.push_back({std::exchange(segments, {}), std::move(copied)});
}

void CopyOut::keep(const Interrupt& interrupt) {
  if (provision_ != nullptr) provision_->keep(interrupt);
  claim_.set_image(std::move(image_));
}

void CopyOut::commit() noexcept {
  claim_.set_stored(claim_.has_digests() && !is_exposed_);
  digest_memory_.keep();
  disk_space_.keep();
  if (stand_ins_ != nullptr) stand_ins_->keep();
}

void CopyOut::copy_to_stand_in(const Segment& segment, const Piece& piece) {
  claim_.device().driver().check<Call::cuMemcpyDtoDAsync>(segment.stand_in->window.address() + piece.offset,
                                                          segment.range.address() + piece.offset, piece.size,
                                                          claim_.stream().get());
  bytes_ += piece.size;
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
