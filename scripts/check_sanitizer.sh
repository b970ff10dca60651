#!/usr/bin/env bash
# Builds the extension with a sanitizer and runs the tests on it.
#
# Usage: check_sanitizer.sh PYTHON address|thread [PYTEST_ARGUMENT...]
# `address` stands for address and undefined behaviour. PYTHON is an environment with the `build` and
# `test` requirements. The interpreter itself is not instrumented, so the sanitizer's runtime is
# preloaded, and leaks are not looked for: the interpreter never frees all it has.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
name=$2
shift 2

site="$PWD/build/sanitize/$name"
reports="$PWD/build/sanitize/reports-$name"

# These test the sources, the build, the command line and the benchmarks, not the extension.
skip=()
for file in architecture benchmarks cli_demo cli_doctor packaging readme; do
  skip+=("--ignore=tests/test_$file.py")
done
# That nothing has to be preloaded cannot be seen while something is.
skip+=(--deselect tests/test_reports.py::test_no_preload_no_variable_and_no_runtime_library_is_needed)

# handle_segv=0: reading paused memory has to die of the signal, as it does without a sanitizer.
options="handle_segv=0:log_path=$reports/report"
launcher=()
case $name in
  address)
    kinds=address,undefined
    library=libasan.so
    # quarantine_size_mb: tests watch the process's memory, which freed blocks must not fill.
    export ASAN_OPTIONS="$options:detect_leaks=0:abort_on_error=1:quarantine_size_mb=1"
    export UBSAN_OPTIONS="print_stacktrace=1"
    ;;
  thread)
    kinds=thread
    library=libtsan.so
    export TSAN_OPTIONS="$options:suppressions=$PWD/scripts/tsan.supp:die_after_fork=0:second_deadlock_stack=1"
    # Its fixed memory layout can collide with much address randomisation.
    if setarch "$(uname -m)" -R true 2>/dev/null; then
      launcher=(setarch "$(uname -m)" -R)
    fi
    # Thousands of failures one after the other: slow here, and about memory more than about threads.
    skip+=(--ignore=tests/test_faults.py)
    # Its shadow memory grows with what is touched and hides what the process gives back.
    skip+=(--deselect tests/test_host_memory.py::test_resident_memory_falls_when_the_backup_goes_back)
    # Two streams that are cut off in the middle of filling the same memory race by intention.
    skip+=(--deselect tests/test_host_driver.py::test_a_process_ends_in_peace_with_streams_blocked_and_busy)
    ;;
  *)
    echo "unknown sanitizer: $name" >&2
    exit 2
    ;;
esac

rm -rf "$site" "$reports"
mkdir -p "$reports"
FENCEPOOL_SANITIZE="$kinds" FENCEPOOL_BUILD_DIR="build/sanitize/cmake-$name" \
  "$python" -m pip install --quiet --no-deps --no-build-isolation --target "$site" .

runtime() { "${CXX:-g++}" -print-file-name="$1"; }

# PYTHONPATH comes before the editable install. The C++ library is preloaded too: the runtimes look for
# its throw before Python loads it. One OpenMP thread: the sanitizers know nothing of what orders
# PyTorch's own threads.
status=0
env LD_PRELOAD="$(runtime "$library") $(runtime libstdc++.so.6)" PYTHONPATH="$site" OMP_NUM_THREADS=1 \
  "${launcher[@]}" "$python" -m pytest -p no:cacheprovider -m "not soak and not gpu" -n 2 --timeout 300 \
  "${skip[@]}" "$@" || status=$?

# Workers and child processes end before their reports reach the terminal. A report is a failure even
# when the test that caused it passed.
if [[ -n $(ls "$reports") ]]; then
  tail -n +1 "$reports"/* >&2
  exit 1
fi
exit "$status"
