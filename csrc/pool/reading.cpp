// Reading what a paused pool holds from its backup.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>

#include "digest/format.h"
#include "pool/claim.h"
#include "pool/pool.h"

namespace fencepool {
namespace {

Error not_backed_up(const Pool& pool, std::size_t size, const std::string& why) {
  Error error(Kind::kInvalid, pool.describe() + " has no backup of these " + format_bytes(size) + ": " + why);
  error.pool = pool.tag();
  return error;
}

constexpr const char* kUnread = "The pool is still paused; nothing was changed";
constexpr const char* kNotLive = "they were no live tensor when it was paused";

// Appends a run of bytes, to the last part where it goes on there.
void append(std::vector<BackupPart>& parts, std::shared_ptr<const HostChunk> chunk, const char* start,
            std::size_t size) {
  const bool goes_on = !parts.empty() && parts.back().owner == nullptr;
  if (goes_on && parts.back().start + parts.back().size == start) {
    if (parts.back().chunks.back() != chunk) parts.back().chunks.push_back(std::move(chunk));
    parts.back().size += size;
  } else {
    parts.push_back({{std::move(chunk)}, nullptr, start, size});
  }
}

// All of them share one block of zeros, made for the first: what is stored nowhere is a block or a part of
// one.
void append_zeros(std::vector<BackupPart>& parts, std::shared_ptr<const char>& zeros, std::size_t size) {
  if (zeros == nullptr) {
    const auto block = std::make_shared<std::array<char, digest::kBlock>>();
    zeros = {block, block->data()};
  }
  parts.push_back({{}, zeros, zeros.get(), size});
}

// Calls `use` with each piece of a segment that lies in [offset, end), and that part of it. Returns how far
// the pieces went without a gap.
template <class Pieces, class Use>
std::size_t for_each_piece(Pieces& pieces, std::size_t offset, std::size_t end, Use use) {
  for (auto& piece : pieces) {
    if (offset >= end || offset < piece.offset || offset >= piece.offset + piece.size) continue;
    const std::size_t size = std::min(piece.offset + piece.size, end) - offset;
    use(piece, offset - piece.offset, size);
    offset += size;
  }
  return offset;
}

}  // namespace

std::vector<BackupPart> Pool::backup_of(CUdeviceptr address, std::size_t size, bool is_view,
                                        const Interrupt& interrupt) {
  if (policy_.backup == Backup::kNone) throw not_backed_up(*this, size, "its policy keeps none");
  Claim claim(shared_from_this(), "reading", interrupt);
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
  const std::size_t offset = address - found->range.address();
  if (policy_.backup == Backup::kResident) return stand_in_of(*found, offset, size);
  if (policy_.backup == Backup::kDisk) return {read_from_disk(claim, *found, offset, size, interrupt)};
  std::vector<BackupPart> parts;
  std::shared_ptr<const char> zeros;
  const std::size_t end = offset + size;
  const auto pieces = claim.image().find(found->serial);
  std::size_t reached = offset;
  if (pieces != claim.image().end()) {
    reached =
        for_each_piece(pieces->second, offset, end, [&](Piece& piece, std::size_t inside, std::size_t part) {
          if (piece.position == kZeros) return append_zeros(parts, zeros, part);
          for (std::size_t done = 0; done < part;) {
            const HostBuffer::Place place = claim.buffer().place(piece.position + inside + done, part - done);
            append(parts, claim.buffer().share(place.chunk), place.address, place.size);
            done += place.size;
          }
        });
  }
  if (reached < end) throw not_backed_up(*this, size, kNotLive);
  if (is_view && parts.size() == 1) expose(claim, pieces->second, offset, end);
  return parts;
}

// The memory that stands at the tensors' addresses, seen through its window.
std::vector<BackupPart> Pool::stand_in_of(const Segment& segment, std::size_t offset,
                                          std::size_t size) const {
  const auto* start = reinterpret_cast<const char*>(segment.stand_in->window.address() + offset);
  return {{{}, segment.stand_in, start, size}};
}

// A copy: what is on a disk has no memory of its own.
BackupPart Pool::read_from_disk(Claim& claim, const Segment& segment, std::size_t offset, std::size_t size,
                                const Interrupt& interrupt) const {
  DiskFile& file = claim.disk().file;
  const std::size_t step = file.step();
  constexpr std::size_t kAtOnce = Staging::kBuffer;
  const std::shared_ptr<char> whole(new char[size], std::default_delete<char[]>());
  const std::unique_ptr<char, void (*)(void*)> room(static_cast<char*>(std::aligned_alloc(step, kAtOnce)),
                                                    std::free);
  if (room == nullptr) throw std::bad_alloc();
  char* to = whole.get();
  const auto read = [&](const Piece& piece, std::size_t inside, std::size_t part) {
    if (piece.position == kZeros) {
      std::memset(to, 0, part);
      to += part;
      return;
    }
    for (std::size_t at = piece.position + inside, end = at + part; at < end;) {
      const std::size_t first = at / step * step;
      const std::size_t last = std::min(in_steps(end, step), first + kAtOnce);
      file.read(first, room.get(), last - first);
      const std::size_t got = std::min(end, last) - at;
      std::memcpy(to, room.get() + (at - first), got);
      to += got;
      at += got;
      if (interrupt) interrupt();
    }
  };
  std::vector<Piece> runs;
  for (const Piece& piece : claim.image()[segment.serial]) append_run(runs, piece);
  std::size_t reached = offset;
  try {
    reached = for_each_piece(runs, offset, offset + size, read);
  } catch (DiskFile::Ended& error) {
    error.message += ", in the segment at " + format_address(segment.range.address());
    explain(error, size, kUnread);
    throw;
  } catch (Error& error) {
    explain(error, size, kUnread);
    throw;
  }
  if (reached < offset + size) throw not_backed_up(*this, size, kNotLive);
  return {{}, whole, whole.get(), size};
}

// What is written to a view is restored, so it must be the only place that these bytes come from, and
// no digest can speak for it any more.
void Pool::expose(Claim& claim, std::vector<Piece>& pieces, std::size_t offset, std::size_t end) {
  std::set<std::size_t> positions;
  for_each_piece(pieces, offset, end, [&](const Piece& piece, std::size_t, std::size_t) {
    if (piece.position == kZeros || !positions.insert(piece.position).second) positions.insert(kZeros);
  });
  std::size_t uses = 0;
  for (const auto& [segment, others] : claim.image()) {
    for (const Piece& piece : others) uses += positions.count(piece.position);
  }
  if (positions.count(kZeros) != 0 || uses != positions.size()) {
    throw not_backed_up(
        *this, end - offset,
        "they are stored once together with equal bytes, and have no view of their own; a copy "
        "can be had");
  }
  claim.set_stored(false);
  for_each_piece(pieces, offset, end,
                 [](Piece& piece, std::size_t, std::size_t) { piece.is_digested = false; });
}

}  // namespace fencepool
