// Every pool of the process, by tag, device and policy.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pool/pool.h"

namespace fencepool::registry {

// The open pool of that tag, device and policy, made when there is none. Thread-safe.
// Throws kInvalid for an empty tag or one with a NUL, kUnavailable for a device that cannot serve, kDisk for
// a directory that cannot.
std::shared_ptr<Pool> get_pool(Device& device, const std::string& tag, const Policy& policy);
// In the order they were made.
std::vector<std::shared_ptr<Pool>> pools();
// Closes the pool and forgets it; throws kBusy while it has live tensors.
void close(const std::shared_ptr<Pool>& pool, const Interrupt& interrupt);

}  // namespace fencepool::registry
