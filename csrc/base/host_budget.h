// How much pinned host memory the backups of all pools may take together.
//
// The budget is what FENCEPOOL_HOST_BUDGET says (read once), until set() says otherwise. Thread-safe.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace fencepool::host_budget {

// Bytes from "1073741824", "1.5GiB" or "64GB". Throws kInvalid that names `what`.
std::size_t parse(const std::string& text, const std::string& what);

// No value: no budget. What is there already stays, also beyond it. 0: no backups.
void set(std::optional<std::size_t> bytes);
// Throws kInvalid while FENCEPOOL_HOST_BUDGET holds something that is no size.
std::optional<std::size_t> get();
std::size_t used();  // bytes that backups hold now, or are about to
// Whether `bytes` more are within the budget.
bool allows(std::size_t bytes);
// Throws kHostMemory when they are not.
void require(std::size_t bytes);

// A share of the budget, while it lives.
class Charge {
 public:
  // Throws kHostMemory as require() does; nothing is taken then.
  explicit Charge(std::size_t bytes);
  // Takes `bytes` over from another one, which keeps the rest.
  Charge(Charge& whole, std::size_t bytes) noexcept;
  ~Charge();
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

  // The memory is leaked: it counts for ever.
  void leak() noexcept { bytes_ = 0; }

 private:
  std::size_t bytes_;
};

}  // namespace fencepool::host_budget
