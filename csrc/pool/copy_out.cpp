#include "pool/copy_out.h"

#include "base/clock.h"
#include "base/problems.h"
#include "pool/claims.h"

namespace fencepool {

CopyOut::CopyOut(Pool::Claim& claim)
    : claim_(claim), image_(claim.plan_image()), provision_(claim.buffer(), Pool::Claim::image_bytes(image_)) {}

CopyOut::~CopyOut() {
  if (is_running_ && !drain(claim_)) {
    problems::record({claim_.pool().tag(), ": a copy could not be awaited; its host memory is leaked"});
    provision_.leak();
  }
}

void CopyOut::start() {
  const CUstream stream = claim_.stream().get();
  is_running_ = true;
  for (const Segment* segment : claim_.segments()) {
    for (const Pool::Claim::Piece& piece : image_.at(segment->serial)) copy(segment->range.address(), piece, stream);
  }
}

void CopyOut::finish() {
  claim_.stream().synchronize();
  is_running_ = false;
  provision_.keep();
  claim_.set_image(std::move(image_));
}

void CopyOut::copy(CUdeviceptr from, const Pool::Claim::Piece& piece, CUstream stream) {
  for (std::size_t done = 0; done < piece.size;) {
    const HostBuffer::Place place = claim_.buffer().place(piece.position + done, piece.size - done);
    Stopwatch watch;
    provision_.wait(place.chunk);
    seconds_waited_ += watch.lap();
    claim_.device().driver().check<Call::cuMemcpyDtoHAsync>(static_cast<void*>(place.address),
                                                            from + piece.offset + done, place.size, stream);
    done += place.size;
    bytes_ += place.size;
  }
}

}  // namespace fencepool
