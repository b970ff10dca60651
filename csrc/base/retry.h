// A second try, for undo calls: a passing failure should not cost a resource.
#pragma once

namespace fencepool {

// Whether `attempt` succeeded, tried at most twice.
template <class Attempt>
bool succeeds_in_two(Attempt attempt) {
  if (attempt()) return true;
  return attempt();
}

}  // namespace fencepool
