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

# These test files and interpreters other than the one at hand, not the extension.
skip=(--ignore=tests/test_architecture.py --ignore=tests/test_packaging.py)

# Thread sanitizer's fixed memory layout can collide with much address randomisation.
fixed_layout=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
  fixed_layout=(setarch "$(uname -m)" -R)
fi

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
    "$python" -m pytest -p no:cacheprovider "${skip[@]}" "${arguments[@]}"
}

# handle_segv=0: reading paused memory has to die of the signal, as it does without a sanitizer.
run address address,undefined libasan.so \
  ASAN_OPTIONS=detect_leaks=0:handle_segv=0:abort_on_error=1 \
  UBSAN_OPTIONS=print_stacktrace=1

run thread thread libtsan.so \
  TSAN_OPTIONS=handle_segv=0:halt_on_error=1:second_deadlock_stack=1 \
  "${fixed_layout[@]}"
