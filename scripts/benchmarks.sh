#!/usr/bin/env bash
# Runs the benchmarks, but for sglang_engine.py, one after the other: each has to be alone on the machine.
#
# Usage: benchmarks.sh PYTHON DEVICE DISK OUTPUT [NAME...]
# PYTHON has fencepool and its extra `test` installed, and torch_memory_saver for the peer. DEVICE is cuda:N, or
# cpu for a try on the embedded driver. DISK is a folder on the disk to measure, OUTPUT where results go, and a
# NAME the program of those to run; all by default. Fails when any of them does, after running the others.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1 device=$2 disk=$3 output=$4
shift 4
names=" $* "

if [[ $device == cpu ]]; then layouts=(tiny); else layouts=(7b moe small); fi
runs=(
  "digest_speed"
  "layers"
  "swap"
  "resident"
  "disk_backup --directory $disk"
  "scaling --backup host"
  "scaling --backup none"
  "resume_latency --layout ${layouts[0]}"
  "resume_latency --layout ${layouts[0]} --change 0 --systems fencepool,torch_memory_saver"
  "resume_latency --layout ${layouts[0]} --change 0.01 --systems fencepool,torch_memory_saver"
)
for layout in "${layouts[@]:1}"; do runs+=("resume_latency --layout $layout"); done

for name in "$@"; do
  [[ " ${runs[*]%% *} " == *" $name "* ]] || { echo "no benchmark is called $name" >&2; exit 2; }
done

failed=()
for run in "${runs[@]}"; do
  read -ra words <<<"$run"
  [[ $names == "  " || $names == *" ${words[0]} "* ]] || continue
  echo "== $run"
  SECONDS=0
  "$python" "benchmarks/${words[0]}.py" --device "$device" --output "$output" "${words[@]:1}" || failed+=("$run")
  echo "== $run: $SECONDS s"
done
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
