#include "pool/copy_out.h"

#include <utility>

#include "base/clock.h"
#include "base/problems.h"
#include "pool/claims.h"

namespace fencepool {

CopyOut::CopyOut(Pool::Claim& claim)
    : claim_(claim),
      image_(claim.plan_image()),
      provision_(claim.buffer(), Pool::Claim::image_bytes(image_)) {}

CopyOut::~CopyOut() {
  if (bytes_ == 0 || drain(claim_)) return;
  problems::record({claim_.pool().tag(), ": copies to the backup could not be awaited"});
  claim_.buffer().set_unsettled();
}

void CopyOut::start(const Interrupt& interrupt) {
  std::vector<Segment*> batch;
  std::size_t batch_bytes = 0;
  for (Segment* segment : claim_.segments()) {
    for (const Pool::Claim::Piece& piece : image_.at(segment->serial)) {
      copy(segment->range.address(), piece, interrupt);
      batch_bytes += piece.size;
    }
    batch.push_back(segment);
    if (batch_bytes >= kBatch && provision_.bytes_added() == 0) {
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
  provision_.keep(interrupt);
  claim_.set_image(std::move(image_));
}

void CopyOut::copy(CUdeviceptr from, const Pool::Claim::Piece& piece, const Interrupt& interrupt) {
  const CUstream stream = claim_.stream().get();
  for (std::size_t done = 0; done < piece.size;) {
    const HostBuffer::Place place = claim_.buffer().place(piece.position + done, piece.size - done);
    Stopwatch watch;
    provision_.wait(place.chunk, interrupt);
    seconds_waited_ += watch.lap();
    claim_.device().driver().check<Call::cuMemcpyDtoHAsync>(static_cast<void*>(place.address),
                                                            from + piece.offset + done, place.size, stream);
    done += place.size;
    bytes_ += place.size;
  }
}

}  // namespace fencepool
