#!/usr/bin/env bash
# Builds the core without Python and runs its C++ tests (tests/cpp), plain or with a sanitizer.
#
# Usage: cpp_tests.sh PYTHON plain|address|thread [DOCTEST_ARGUMENT...]
# PYTHON is an environment with the `build` requirements. Needs doctest (Debian and Ubuntu: doctest-dev).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
name=$2
shift 2

launcher=()
case $name in
  plain) sanitize= ;;
  address)
    sanitize=address,undefined
    # detect_leaks=0: what outlives static destructors is never freed, by intention.
    export ASAN_OPTIONS="detect_leaks=0:abort_on_error=1" UBSAN_OPTIONS="print_stacktrace=1"
    ;;
  thread)
    sanitize=thread
    export TSAN_OPTIONS="suppressions=$PWD/scripts/tsan.supp:second_deadlock_stack=1"
    # Its fixed memory layout can collide with much address randomisation.
    if setarch "$(uname -m)" -R true 2>/dev/null; then launcher=(setarch "$(uname -m)" -R); fi
    ;;
  *)
    echo "unknown build: $name" >&2
    exit 2
    ;;
esac

if ! echo '#include <doctest/doctest.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; then
  echo "the C++ tests need doctest; please install doctest-dev" >&2
  exit 1
fi

folder=build/cpp-tests/$name
bin=$(cd "$(dirname "$python")" && pwd)
PATH=$bin:$PATH cmake -S . -B "$folder" -G Ninja -DFENCEPOOL_CPP_TESTS=ON -DFENCEPOOL_SANITIZE="$sanitize" \
  -DPython_EXECUTABLE="$bin/$(basename "$python")" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" >/dev/null
PATH=$bin:$PATH cmake --build "$folder" --target core_tests
exec "${launcher[@]}" "$folder/core_tests" "$@"
