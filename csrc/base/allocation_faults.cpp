#include "base/allocation_faults.h"

#include <cstdlib>
#include <new>

namespace fencepool::allocation_faults {
namespace {

struct Thread {
  bool is_armed = false;
  bool is_lasting = false;
  unsigned inside = 0;
  unsigned exempt = 0;
  std::uint64_t fails_at = 0;
  std::uint64_t seen = 0;
};

thread_local Thread thread;

}  // namespace

void arm(std::uint64_t nth, bool is_lasting) noexcept {
  thread = {true, is_lasting, thread.inside, thread.exempt, nth, 0};
}

std::uint64_t disarm() noexcept {
  thread.is_armed = false;
  return thread.seen;
}

Inside::Inside() noexcept { ++thread.inside; }
Inside::~Inside() { --thread.inside; }

Exempt::Exempt() noexcept { ++thread.exempt; }
Exempt::~Exempt() { --thread.exempt; }

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {

void* allocate(std::size_t size) {
  if (thread.is_armed && thread.inside > 0 && thread.exempt == 0) {
    ++thread.seen;
    if (thread.seen == thread.fails_at || (thread.is_lasting && thread.seen > thread.fails_at)) {
      throw std::bad_alloc();
    }
  }
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace
#endif

}  // namespace fencepool::allocation_faults

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// NOLINTBEGIN(misc-new-delete-overloads): nobody here asks for other alignments
void* operator new(std::size_t size) { return fencepool::allocation_faults::allocate(size); }
void* operator new[](std::size_t size) { return fencepool::allocation_faults::allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
// NOLINTEND(misc-new-delete-overloads)
#endif
