#!/bin/bash
# Measures the papers' matrix: submits a job for each layout, in which `python -m bench measure` starts the strategies
# on models of several sizes, with random weights.
#
#     . slurm/env.sh && slurm/measure.sh                                 # 1x8 to 8x8
#     . slurm/env.sh && slurm/measure.sh 1x4 2x4 : --preset llama-7b     # own layouts, and arguments of the bench
#
# Layouts are nodes x devices. Rows are added to $RLHF_SPMD_RUNS/measure/LAYOUT.jsonl; a job that is submitted again
# measures what is missing there.
set -euo pipefail
# shellcheck source=slurm/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

layouts=()
while (($#)) && [[ $1 != : ]]; do
    if [[ ! $1 =~ ^[1-9][0-9]*x[1-9][0-9]*$ ]]; then
        echo "usage: slurm/measure.sh [LAYOUT ...] [: OPTIONS OF bench measure], a layout being NODESxDEVICES" >&2
        exit 2
    fi
    layouts+=("$1")
    shift
done
((${#layouts[@]})) || layouts=(1x8 2x8 4x8 8x8)
for layout in "${layouts[@]}"; do
    words="measure --layout $layout --out $RLHF_SPMD_RUNS/measure/$layout.jsonl ${*:2}"
    sbatch --job-name="measure-$layout" -N "${layout%x*}" --ntasks-per-node="${layout#*x}" --array=0 \
        "$RLHF_SPMD_SLURM/bench.sbatch" "$words"
done
