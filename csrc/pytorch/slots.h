// Pools as allocators of PyTorch.
//
// PyTorch takes an allocator as two plain C functions and gives them no argument of ours. So each pool in
// use has a slot, and each slot two entry points of its own (entry_points.cpp). Which pool memory comes
// from then depends on no thread's state.
#pragma once

#include <memory>
#include <string>

#include "pool/pool.h"

namespace fencepool::torch_slots {

inline constexpr int kSlots = 64;

// The pool's slot, taken on first use and kept until it is given back. Throws kBusy when all are taken.
// Thread-safe, as is everything here.
int slot_of(const std::shared_ptr<Pool>& pool);
// For a pool that is closed.
void give_slot_back(const Pool& pool);

// Why the slot's last allocation was refused; null when it was not. An entry point cannot raise: it
// returns null, PyTorch frees its caches and tries again, then raises an error of its own.
std::shared_ptr<const Error> last_refusal(const Pool& pool);

// What the entry points do. They never take the GIL, never throw, and wait for no other thread longer
// than a few seconds: PyTorch calls them with its allocator's lock held, and sometimes with the GIL.
void* allocate(int slot, std::size_t size, int ordinal) noexcept;
void give_back(int slot, void* address) noexcept;

}  // namespace fencepool::torch_slots
