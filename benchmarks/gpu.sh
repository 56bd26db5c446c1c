#!/bin/sh
# Check on a GPU that all engines agree with the engine 'loop', then measure their speed, in less than 8 minutes.
#
#     sh benchmarks/gpu.sh [FOLDER]
#
# The tables (as text) and the timings (as JSON) are written to FOLDER (default: gpu-results). The speed is measured even
# if some engines do not agree; the exit status is then 1.
set -eu
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
status=0
{
    python -c "import torch; print(torch.cuda.get_device_name(), '· torch', torch.__version__, '· CUDA', torch.version.cuda)" &&
        timeout 200 python benchmarks/agreement.py --device cuda
} >"$out/agreement.txt" 2>&1 || status=1
cat "$out/agreement.txt"
timeout 260 python benchmarks/engine.py --device cuda --clients 100 --repeats 3 --json "$out/engine.json" >"$out/engine.txt" 2>&1 ||
    status=1
cat "$out/engine.txt"
exit $status
