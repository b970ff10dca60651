#include <doctest/doctest.h>

#include "support.h"

using namespace fencepool;
using namespace fencepool::testing;

TEST_CASE("contents and addresses survive cycles, and memory is given back") {
  const auto before = host_driver::counts();
  const auto pool = new_pool(Backup::kHost);
  {
    auto large = pool->allocate(5 * kMiB, {});
    auto small = pool->allocate(700, {});
    fill(*large, 1);
    fill(*small, 2);
    const CUdeviceptr address = large->address();
    for (int cycle = 0; cycle < 5; ++cycle) {
      pause_pools({pool});
      CHECK_FALSE(host_driver::is_accessible(address, 1));
      CHECK(pool->status().bytes_mapped == 0);
      resume_pools({pool});
      CHECK(large->address() == address);
      CHECK(holds(*large, 1));
      CHECK(holds(*small, 2));
    }
  }
  registry::close(pool, {});
  CHECK(host_driver::counts().ranges == before.ranges);
  CHECK(host_driver::counts().physical_bytes == before.physical_bytes);
  CHECK(host_driver::counts().registrations == before.registrations);
}

TEST_CASE("a resume without memory leaves everything paused, and works once there is some") {
  const auto first = new_pool(Backup::kHost);
  const auto second = new_pool(Backup::kHost);
  {
    auto a = first->allocate(8 * kMiB, {});
    auto b = second->allocate(8 * kMiB, {});
    fill(*a, 3);
    fill(*b, 4);
    pause_pools({first, second});
    {
      host_driver::Settings settings;
      settings.memory_limit = 12 * kMiB;
      const WithSettings little(settings);
      CHECK_THROWS_AS(resume_pools({first, second}), Error);
      CHECK(first->status().is_paused);
      CHECK(second->status().is_paused);
    }
    resume_pools({first, second});
    CHECK(holds(*a, 3));
    CHECK(holds(*b, 4));
  }
  registry::close(first, {});
  registry::close(second, {});
}

TEST_CASE("a tensor's backup is read in one part, across chunks") {
  const auto pool = new_pool(Backup::kHost, 0, Digests::kNone);  // or its equal blocks would be stored once
  {
    auto block = pool->allocate(130 * kMiB, {});
    fill(*block, 7);
    pause_pools({pool});
    auto parts = pool->backup_of(block->address(), block->size(), false, {});
    REQUIRE(parts.size() == 1);
    CHECK(parts[0].chunks.size() == 2);
    CHECK(parts[0].start[0] == 7);
    CHECK(parts[0].start[parts[0].size - 1] == 7);
    resume_pools({pool});
    static_cast<void>(pool->trim({}));
    CHECK(parts[0].start[0] == 7);  // whoever holds the chunks keeps the memory
    CHECK_THROWS_AS(pool->backup_of(block->address(), block->size(), false, {}), Error);
  }
  registry::close(pool, {});
}
