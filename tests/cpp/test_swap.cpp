// Swaps without Python: contents, one pool on both sides, and threads that swap in opposite directions.
#include <doctest/doctest.h>

#include <thread>

#include "support.h"

using namespace fencepool;
using namespace fencepool::testing;

namespace {

SwapReport swap_pools(const std::vector<std::shared_ptr<Pool>>& out,
                      const std::vector<std::shared_ptr<Pool>>& in) {
  ResumeOptions options;
  options.is_host_held = true;
  return fencepool::swap(out, in, PauseOptions{}, options);
}

}  // namespace

TEST_CASE("pools change places, contents and all") {
  const auto first = new_pool(Backup::kHost);
  const auto second = new_pool(Backup::kHost);
  {
    auto a = first->allocate(3 * kMiB, {});
    auto b = second->allocate(5 * kMiB, {});
    fill(*a, 1);
    fill(*b, 2);
    pause_pools({second});
    const SwapReport there = swap_pools({first}, {second});
    CHECK(there.paused.pools.front().bytes == 4 * kMiB);
    CHECK(there.resumed.pools.front().bytes == 6 * kMiB);
    CHECK(first->status().bytes_mapped == 0);
    CHECK(holds(*b, 2));
    swap_pools({second}, {first});
    CHECK(second->status().bytes_mapped == 0);
    CHECK(holds(*a, 1));
    CHECK_THROWS_AS(swap_pools({first, second}, {second}), Error);
    CHECK(holds(*a, 1));
    resume_pools({second});
    CHECK(holds(*b, 2));
  }
  registry::close(first, {});
  registry::close(second, {});
}

TEST_CASE("threads that swap in opposite directions neither wait for ever nor lose anything") {
  const auto first = new_pool(Backup::kHost);
  const auto second = new_pool(Backup::kHost);
  {
    auto a = first->allocate(2 * kMiB, {});
    auto b = second->allocate(2 * kMiB, {});
    fill(*a, 3);
    fill(*b, 4);
    std::vector<std::thread> threads;
    for (const bool is_first : {true, false, true, false}) {
      threads.emplace_back([&, is_first] {
        for (int i = 0; i < 20; ++i) swap_pools({is_first ? first : second}, {is_first ? second : first});
      });
    }
    for (std::thread& thread : threads) thread.join();
    resume_pools({first, second});
    CHECK(holds(*a, 3));
    CHECK(holds(*b, 4));
  }
  registry::close(first, {});
  registry::close(second, {});
}
