// Reading what a paused pool holds from its backup.
#include "pool/claim.h"
#include "pool/pool.h"

namespace fencepool {
namespace {

Error not_backed_up(const Pool& pool, std::size_t size, const std::string& why) {
  Error error(Kind::kInvalid, pool.describe() + " has no backup of these " + format_bytes(size) + ": " + why);
  error.pool = pool.tag();
  return error;
}

// Appends a run of bytes, to the last part where it goes on there.
void append(std::vector<BackupPart>& parts, std::shared_ptr<const HostChunk> chunk, const char* start,
            std::size_t size) {
  if (!parts.empty() && parts.back().start + parts.back().size == start) {
    if (parts.back().chunks.back() != chunk) parts.back().chunks.push_back(std::move(chunk));
    parts.back().size += size;
  } else {
    parts.push_back({{std::move(chunk)}, start, size});
  }
}

}  // namespace

std::vector<BackupPart> Pool::backup_of(CUdeviceptr address, std::size_t size, const Interrupt& interrupt) {
  if (policy_.backup != Backup::kHost) throw not_backed_up(*this, size, "its policy keeps none");
  const Claim claim(shared_from_this(), "reading", interrupt);
  if (claim.state() != State::kPaused) {
    throw not_backed_up(*this, size, "it is active, and its contents are in the tensors themselves");
  }
  if (!claim.keeps_contents()) throw not_backed_up(*this, size, "the pause discarded them");
  const Segment* found = nullptr;
  for (const Segment* segment : claim.segments()) {
    const CUdeviceptr start = segment->range.address();
    if (address >= start && address + size <= start + segment->range.size()) found = segment;
  }
  if (found == nullptr) throw not_backed_up(*this, size, "they do not lie in one of its segments");
  if (!found->is_backed_up) {
    throw not_backed_up(*this, size, "after a pause that failed they are kept in device memory; resume it");
  }
  std::vector<BackupPart> parts;
  std::size_t offset = address - found->range.address();
  const std::size_t end = offset + size;
  const auto pieces = claim.image().find(found->serial);
  if (pieces != claim.image().end()) {
    for (const Piece& piece : pieces->second) {
      while (offset >= piece.offset && offset < piece.offset + piece.size && offset < end) {
        const std::size_t inside = offset - piece.offset;
        const HostBuffer::Place place =
            claim.buffer().place(piece.position + inside, std::min(piece.size - inside, end - offset));
        append(parts, claim.buffer().share(place.chunk), place.address, place.size);
        offset += place.size;
      }
    }
  }
  if (offset < end) throw not_backed_up(*this, size, "they were no live tensor when it was paused");
  return parts;
}

}  // namespace fencepool
