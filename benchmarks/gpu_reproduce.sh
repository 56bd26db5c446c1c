#!/bin/sh
# The papers' own scale on a GPU, in pieces: every call ends within 8 minutes, and the next goes on where it stopped.
#
#     sh benchmarks/gpu_reproduce.sh [FOLDER [NAME ...]]
#
# FOLDER (default: reproduced/paper) gets the results; copy its JSON files to results/ when all are there. NAME is one of
# 'fedclade reproduce --list'; without names it is every experiment whose data is there. Exit status: 0 when all are
# finished, 130 when there is more to do, so that a loop does it all:
#
#     while :; do sh benchmarks/gpu_reproduce.sh OUT && break; [ $? -eq 130 ] || exit 1; done
#
# It needs the source of the library and of fedclade-papers, torch and the packages that a simulation imports, with typer and rich; tomli-w may be
# missing. Each result says how long its pieces took, and on which GPU.
set -eu
cd "$(dirname "$0")/.."
out=${1:-reproduced/paper}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- all
export PYTHONPATH="src:packages/fedclade-papers/src${PYTHONPATH:+:$PYTHONPATH}"
# TERM lets the run that is on finish its round and save a checkpoint; 40 seconds later it is ended all the same, and the
# next call goes on from an earlier checkpoint.
status=0
timeout --signal=TERM --kill-after=40 430 \
    python -m fedclade_papers "$@" --scale paper --device "${DEVICE:-cuda}" --out "$out" || status=$?
case $status in
0) echo "all finished: $out" ;;
124 | 130 | 137) echo "there is more to do: call this again"; exit 130 ;;
*) exit "$status" ;;
esac
