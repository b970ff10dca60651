// Backups on a disk without Python: threads, and what fails half-way.
#include <doctest/doctest.h>

#include <cerrno>
#include <cstdlib>
#include <thread>

#include "base/system_calls.h"
#include "support.h"

using namespace fencepool;
using namespace fencepool::testing;

namespace {

std::shared_ptr<Pool> disk_pool(int ordinal = 0, Digests digests = Digests::kAvailable) {
  static std::atomic<int> number{0};
  Policy policy;
  policy.backup = Backup::kDisk;
  policy.digests = digests;
  const char* directory = std::getenv("FENCEPOOL_DISK_DIRECTORY");
  policy.directory = directory == nullptr ? "/var/tmp" : directory;
  return registry::get_pool(device(ordinal), "disk-" + std::to_string(++number), policy);
}

// Every byte, so that no two blocks are equal.
void number(const Block& block, std::uint64_t seed) {
  auto* words = reinterpret_cast<std::uint64_t*>(block.address());
  for (std::size_t i = 0; i < block.size() / 8; ++i) words[i] = i * 0x9e3779b97f4a7c15U + seed;
}

bool is_numbered(const Block& block, std::uint64_t seed) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(block.address());
  for (std::size_t i = 0; i < block.size() / 8; ++i) {
    if (words[i] != i * 0x9e3779b97f4a7c15U + seed) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("contents go to a disk and come back, on threads at once") {
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int index = 0; index < 4; ++index) {
    threads.emplace_back([&, index] {
      try {
        const auto pool = disk_pool(index % 2, index < 2 ? Digests::kAvailable : Digests::kNone);
        {
          const auto large = pool->allocate(20 * kMiB, {});
          const auto small = pool->allocate(3000, {});
          for (std::uint64_t round = 0; round < 4; ++round) {
            number(*large, round);
            fill(*small, static_cast<unsigned char>(round));
            pause_pools({pool});
            static_cast<void>(pool->status());
            resume_pools({pool});
            if (!is_numbered(*large, round) || !holds(*small, static_cast<unsigned char>(round))) ++failures;
          }
        }
        registry::close(pool, {});
      } catch (const std::exception&) {
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
}

TEST_CASE("a write and a read that fail leave everything as it was") {
  const auto pool = disk_pool();
  {
    const auto block = pool->allocate(40 * kMiB, {});
    number(*block, 7);
    for (std::uint64_t nth = 1; nth <= 10; nth += 3) {
      sys::faults().arm(sys::Call::k_pwrite, nth, false, EIO);
      CHECK_THROWS_AS(pause_pools({pool}), Error);
      CHECK(pool->status().state == "active");
      CHECK(is_numbered(*block, 7));
    }
    pause_pools({pool});
    for (std::uint64_t nth = 1; nth <= 10; nth += 3) {
      sys::faults().arm(sys::Call::k_pread, nth, false, EIO);
      CHECK_THROWS_AS(resume_pools({pool}), Error);
      CHECK(pool->status().state == "paused");
    }
    resume_pools({pool});
    CHECK(is_numbered(*block, 7));
  }
  registry::close(pool, {});
}

TEST_CASE("an interrupt ends reads and writes") {
  const auto pool = disk_pool();
  {
    // More than the buffers hold: the last reads wait for the copies of the first.
    const auto block = pool->allocate(80 * kMiB, {});
    number(*block, 3);
    host_driver::Settings settings;
    settings.bandwidth = 40 * kMiB;  // two seconds for all of it
    PauseOptions pausing;
    ResumeOptions resuming;
    pausing.interrupt = resuming.interrupt = [] { throw Error(Kind::kInvalid, "interrupted"); };
    {
      const WithSettings narrow(settings);
      CHECK_THROWS_AS(pause({pool}, pausing), Error);
    }
    CHECK(is_numbered(*block, 3));
    pause_pools({pool});
    {
      const WithSettings narrow(settings);
      CHECK_THROWS_AS(resume({pool}, resuming), Error);
    }
    CHECK(pool->status().state == "paused");
    resume_pools({pool});
    CHECK(is_numbered(*block, 3));
  }
  registry::close(pool, {});
}
