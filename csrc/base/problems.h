// Failures that cannot be raised where they happen: a deleter, an allocator callback, an undo.
//
// They are recorded here, shown by status(), and what they concern is leaked rather than left
// dangling. Thread-safe; never throws.
#pragma once

#include <string>
#include <vector>

namespace fencepool::problems {

inline constexpr std::size_t kKept = 200;  // the oldest are dropped beyond this

void record(const std::string& what) noexcept;
std::vector<std::string> list();
std::size_t total();  // since the process started, dropped ones included
void clear();

}  // namespace fencepool::problems
