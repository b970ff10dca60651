#!/usr/bin/env bash
# Runs tests/engines with one release of SGLang: scripts/engines.sh PYTHON RELEASE [pytest arguments].
# PYTHON has PyTorch, pytest and fencepool installed. SGLang and what it imports go into a folder of their own
# beside it, without their dependencies: those are gigabytes for GPUs, for which tests/engines/standins stands in.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 release=$2
shift 2

case $release in
  0.5.1[1-9]* | 0.5.2?*) tests=(--ignore=test_before_plugins.py) ;;
  *) tests=(test_before_plugins.py) ;;
esac
# Releases without a list of their own run with the one of 0.5.11.
requirements=tests/engines/requirements-$release.txt
[[ -e $requirements ]] || requirements=tests/engines/requirements-0.5.11.txt
folder=$(cd "$(dirname "$python")/.." && pwd)/sglang-$release
stamp=$folder/.ready-$(cat tests/engines/requirements-common.txt "$requirements" | cksum | cut -d' ' -f1)

if [[ ! -e $stamp ]]; then
  rm -rf "$folder"
  pip=("$python" -m pip --disable-pip-version-check --quiet install --no-deps)
  "${pip[@]}" --target "$folder/imports" -r "$requirements"
  "${pip[@]}" --target "$folder/sglang" "sglang==$release"
  touch "$stamp"
fi

standins=$PWD/tests/engines/standins
path=$folder/sglang:$folder/imports:$standins
if [[ ${tests[0]} == test_before_plugins.py ]]; then
  path+=:${standins}_before_plugins
else
  path+=:$PWD/tests/engines/probe
fi
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
cd tests/engines
PYTHONPATH=$path exec "$python" -m pytest -c pytest.ini --rootdir . --confcutdir . "${tests[@]}" "$@"
