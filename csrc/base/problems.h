// Failures that cannot be raised where they happen: a deleter, an allocator callback, an undo.
//
// They are recorded here, shown by status(), and what they concern is leaked rather than left
// dangling. Thread-safe; never throws, not even for want of memory.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace fencepool::problems {

inline constexpr std::size_t kKept = 200;  // the oldest are dropped beyond this

// The parts are joined here, so that the caller, who may not throw, need not build a string.
void record(std::initializer_list<std::string_view> parts) noexcept;
std::vector<std::string> list();
std::size_t total();  // since the process started, dropped ones included
void clear();

}  // namespace fencepool::problems
