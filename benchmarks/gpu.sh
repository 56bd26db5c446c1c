#!/bin/sh
# Measure fedclade on a GPU, in less than 8 minutes: whether all engines agree with the engine 'loop', the speed of the
# engines, the same rounds in pfl-research if it is installed, and a whole run of CFL.
#
#     sh benchmarks/gpu.sh [FOLDER]
#
# FOLDER (default: gpu-results) then has the tables as text, the timings as JSON, and report.md, which has all tables in
# Markdown. Every part is measured even if one before it failed; the exit status is then 1.
#
# Environment variables: PYTHON is the interpreter (default: python). With SMOKE=1, a few small pieces of each part run
# on the CPU, to try the script on a machine without a GPU; the numbers then mean nothing.
set -eu
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
python=${PYTHON:-python}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
status=0

# part NAME SECONDS COMMAND...: run a command with a time limit, and write what it prints to FOLDER/NAME.txt.
part() {
    name=$1
    limit=$2
    shift 2
    timeout "$limit" "$@" >"$out/$name.txt" 2>&1 || {
        status=1
        echo "$name failed or took more than $limit s" >>"$out/$name.txt"
    }
    cat "$out/$name.txt"
}

# engines NAME SECONDS OPTIONS...: measure the speed of engines.
engines() {
    name=$1
    limit=$2
    shift 2
    part "$name" "$limit" "$python" benchmarks/engine.py "$@" --json "$out/$name.json" --markdown "$out/$name.md"
}

rm -f "$out"/*.md
if [ "${SMOKE:-0}" = 1 ]; then
    device=cpu
    part agreement 600 "$python" benchmarks/agreement.py --models mclr --engines loop stacked
    engines engines 600 --models mclr --clients 3 --repeats 1 --quick
    engines engines-bfloat16 600 --models mclr --clients 3 --repeats 1 --quick --precision bfloat16
    part peers 600 "$python" benchmarks/gpu_runs.py peers "$out/peers.md" --device cpu --quick
    part cfl 600 "$python" benchmarks/gpu_runs.py cfl "$out/run.md" --device cpu --quick
else
    device=cuda
    part agreement 130 "$python" benchmarks/agreement.py --device cuda
    engines engines 130 --device cuda --clients 100 --repeats 3
    engines engines-20 35 --device cuda --clients 20 --repeats 3 --models cifar_cnn lstm
    engines engines-tf32 25 --device cuda --clients 100 --repeats 3 --models cnn cifar_cnn --tf32
    engines engines-bfloat16 25 --device cuda --clients 100 --repeats 3 --models cnn cifar_cnn --precision bfloat16
    part peers 90 "$python" benchmarks/gpu_runs.py peers "$out/peers.md" --device cuda
    part cfl 40 "$python" benchmarks/gpu_runs.py cfl "$out/run.md" --device cuda
fi
# Through a file: a second opening of the report would overwrite its beginning.
"$python" benchmarks/gpu_runs.py machine "$out/machine.md" --device $device
{
    cat "$out/machine.md"
    echo
    echo "**Agreement with the loop on the CPU**"
    echo
    echo '```'
    cat "$out/agreement.txt"
    echo '```'
    for table in engines engines-20 engines-tf32 engines-bfloat16 peers run; do
        [ -f "$out/$table.md" ] && echo && cat "$out/$table.md"
    done
    :
} >"$out/report.md"
echo "all tables: $out/report.md"
exit $status
