#!/bin/sh
# Reproduce experiments at the scale of the papers on a GPU, in parts: each call ends within 8 minutes, and the next call
# continues where it stopped.
#
#     sh benchmarks/gpu_reproduce.sh [FOLDER [NAME ...]]
#
# The results are written to FOLDER (default: reproduced/paper); when all are finished, copy its JSON files to results/.
# NAME is an experiment of 'fedclade reproduce --list'; without names, all experiments run whose data is available. The
# exit status is 0 if all experiments are finished, and 130 if not, so that a loop can run them all:
#
#     while :; do sh benchmarks/gpu_reproduce.sh OUT && break; [ $? -eq 130 ] || exit 1; done
#
# The script needs the source of fedclade and of fedclade-papers, torch and the packages that a simulation imports, typer
# and rich; tomli-w is not needed. Each result states the GPU and the time of its parts.
set -eu
cd "$(dirname "$0")/.."
out=${1:-reproduced/paper}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- all
export PYTHONPATH="src:packages/fedclade-papers/src${PYTHONPATH:+:$PYTHONPATH}"
# After SIGTERM, the run finishes its round and saves a checkpoint. If it has not ended 40 seconds later, it is killed, and
# the next call continues from an earlier checkpoint.
status=0
timeout --signal=TERM --kill-after=40 430 \
    python -m fedclade_papers "$@" --scale paper --device "${DEVICE:-cuda}" --out "$out" || status=$?
case $status in
0) echo "all finished: $out" ;;
124 | 130 | 137) echo "not all are finished: run the same command again"; exit 130 ;;
*) exit "$status" ;;
esac
