// A child made by fork shares none of its parent's driver state, so everything in it is inert.
#pragma once

namespace fencepool::process {

// Remembers this process as the owner. Called before the first driver call; idempotent.
void watch_forks();
// Whether this process is a child, by fork, of the one that used the driver. Async-signal-safe.
bool is_forked_child() noexcept;
// Throws Error(kForked) in such a child.
void require_owner();

}  // namespace fencepool::process
