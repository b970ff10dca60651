#!/usr/bin/env bash
# Builds the extension with address+undefined and with thread sanitizers and runs the tests on each.
#
# Usage: check_sanitizers.sh PYTHON [PYTEST_ARGUMENT...]
# PYTHON is an environment with the `build` and `test` requirements. The Python interpreter itself is
# not instrumented, so the sanitizer's runtime is preloaded and leaks are not looked for (the
# interpreter never frees all it has).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

# These test the sources, the build, the command line and the benchmarks, not the extension.
skip=()
for file in architecture benchmarks cli_demo cli_doctor packaging readme; do
  skip+=("--ignore=tests/test_$file.py")
done
# That nothing has to be preloaded cannot be seen while something is.
skip+=(--deselect tests/test_reports.py::test_no_preload_no_variable_and_no_runtime_library_is_needed)

# Thread sanitizer's fixed memory layout can collide with much address randomisation.
fixed_layout=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
  fixed_layout=(setarch "$(uname -m)" -R)
fi

reports="$PWD/build/sanitize/reports"
rm -rf "$reports"
mkdir -p "$reports"

runtime() { "${CXX:-g++}" -print-file-name="$1"; }

arguments=(-m "not soak and not gpu" -n 2 --timeout 300 "$@")

run() {
  local name=$1 kinds=$2 library=$3
  shift 3
  local site="build/sanitize/$name"
  echo "== $kinds sanitizer"
  rm -rf "$site"
  FENCEPOOL_SANITIZE="$kinds" FENCEPOOL_BUILD_DIR="build/sanitize/cmake-$name" \
    "$python" -m pip install --quiet --no-deps --no-build-isolation --target "$site" .
  # The copy under $site comes before the editable install. One OpenMP thread: the sanitizers know
  # nothing of PyTorch's own threads and what orders them.
  # The C++ library is preloaded too: the runtimes look for its throw before Python loads it.
  env LD_PRELOAD="$(runtime "$library") $(runtime libstdc++.so.6)" PYTHONPATH="$PWD/$site" \
    OMP_NUM_THREADS=1 FENCEPOOL_SANITIZED="$name" "$@" \
    "$python" -m pytest -p no:cacheprovider "${skip[@]}" "${arguments[@]}" && return
  # Workers and child processes end before their reports reach the terminal.
  find "$reports" -type f -exec tail -n +1 {} + >&2
  return 1
}

# handle_segv=0: reading paused memory has to die of the signal, as it does without a sanitizer.
# quarantine_size_mb: tests watch the process's memory, which freed blocks must not fill.
run address address,undefined libasan.so \
  ASAN_OPTIONS=detect_leaks=0:handle_segv=0:abort_on_error=1:quarantine_size_mb=1:log_path="$reports/address" \
  UBSAN_OPTIONS=print_stacktrace=1

# Shadow memory grows with what is touched and hides what the process gives back. Two streams that are
# cut off in the middle of filling the same memory race by intention.
skip+=(--deselect tests/test_host_memory.py::test_resident_memory_falls_when_the_backup_goes_back)
skip+=(--deselect tests/test_host_driver.py::test_a_process_ends_in_peace_with_streams_blocked_and_busy)

run thread thread libtsan.so \
  TSAN_OPTIONS=suppressions="$PWD/scripts/tsan.supp":die_after_fork=0:handle_segv=0:halt_on_error=1:second_deadlock_stack=1:log_path="$reports/thread" \
  "${fixed_layout[@]}"
