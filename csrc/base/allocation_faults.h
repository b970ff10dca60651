// Running out of memory for our own tables, made to happen: the k-th allocation that this thread makes in the
// core fails. What the bindings allocate is left alone: pybind11 does not survive it everywhere.
//
// This extension has an operator new of its own, hidden from the rest of the process. It adds one look at a
// thread-local number to an allocation. Built with a sanitizer, which brings its own, it is left out.
#pragma once

#include <cstdint>

namespace fencepool::allocation_faults {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kIsThere = false;
#else
inline constexpr bool kIsThere = true;
#endif

// The `nth` allocation of this thread inside the core from now on (from 1) throws std::bad_alloc; with
// `is_lasting`, so does every one after it.
void arm(std::uint64_t nth, bool is_lasting) noexcept;
// How many allocations there were since arm(), the failed ones included. None fails any more.
std::uint64_t disarm() noexcept;

// While it lives, this thread is inside the core.
class Inside {
 public:
  Inside() noexcept;
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

// While it lives, this thread's allocations are somebody else's: they neither fail nor count. For the
// embedded driver, since a driver that is out of memory says so by an error code.
class Exempt {
 public:
  Exempt() noexcept;
  ~Exempt();
  Exempt(const Exempt&) = delete;
  Exempt& operator=(const Exempt&) = delete;
};

}  // namespace fencepool::allocation_faults
