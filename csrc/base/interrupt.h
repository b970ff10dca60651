// A way out of a long wait.
#pragma once

#include <functional>

namespace fencepool {

// Called now and then during a wait, with no lock held; throws to end it (the bindings look for
// Python's signals). Empty where nothing may interrupt: in a deleter or an allocator callback.
using Interrupt = std::function<void()>;

}  // namespace fencepool
