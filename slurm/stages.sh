#!/bin/bash
# Submits three jobs, of which each reads the models that earlier ones write: supervised fine-tuning, a reward model,
# PPO with both.
#
#     slurm/stages.sh helpful -N 2 --ntasks-per-node=8 \
#         : --model BASE data.prompts=answers.jsonl iterations=100 \
#         : data.prompts=pairs.jsonl iterations=50 \
#         : data.prompts=questions.jsonl iterations=500
#
# A name, options of sbatch for all jobs, then, after each colon, the arguments of `train` for one stage. Jobs and run
# folders are helpful-sft, helpful-reward and helpful-ppo. A job starts once those before it have ended well; a job that
# is requeued has not ended. If one fails, Slurm cancels those that wait for it. The same command then submits what is
# missing: a stage that has written its model is left as it is, one in the queue is waited for, and an interrupted one
# continues from its checkpoint. For other chains, change the lines at the end.
set -euo pipefail
# shellcheck source=slurm/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

usage() {
    echo "usage: slurm/stages.sh NAME [OPTIONS OF SBATCH] : [ARGUMENTS OF SFT] : [OF THE REWARD MODEL] : [OF PPO]" >&2
    exit 2
}

name=${1:-}
[[ $name =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*$ ]] || usage # a part of names of folders and jobs
options=() sft=() reward=() ppo=() colons=0
for word in "${@:2}"; do
    if [[ $word == : ]]; then
        colons=$((colons + 1))
        continue
    fi
    case $colons in
    0) options+=("$word") ;;
    1) sft+=("$word") ;;
    2) reward+=("$word") ;;
    *) ppo+=("$word") ;;
    esac
done
((colons == 3)) || usage

declare -A jobs # of the stages that have not ended

changes() { # the arguments that a run may be given when it is resumed: KEY=VALUE
    while (($#)); do
        case $1 in
        --*=* | --dry-run) ;;
        --*) shift || return 0 ;; # with its value
        *) echo "$1" ;;
        esac
        shift || return 0
    done
}

stage() { # STAGE, folder of its model, stages before it, arguments of `train`: submits it, if that is not done
    local run=$name-$1 folder=$RLHF_SPMD_RUNS/$name-$1 model=$2 before=$3 words=("${@:4}") how=() after="" one job
    if [[ -f $folder/$model/generation_config.json ]]; then # the last file of a model
        echo "$run: finished, its model is $folder/$model"
        return 0
    fi
    job=$(squeue --me --noheader --name="$run" --format=%i)
    if [[ -n $job ]]; then
        jobs[$1]=${job//$'\n'/:}
        echo "$run: job $job is in the queue"
        return 0
    fi
    for one in $before; do
        after+=${jobs[$one]:+:${jobs[$one]}}
    done
    if [[ -n $after ]]; then
        how=("--dependency=afterok$after" --kill-on-invalid-dep=yes)
    fi
    if [[ -f $folder/config.json ]]; then # train.sbatch resumes it
        mapfile -t words < <(changes "${words[@]}")
    fi
    how+=(--parsable "--job-name=$run")
    job=$(RLHF_SPMD_RUN=$run sbatch "${options[@]}" "${how[@]}" "$RLHF_SPMD_SLURM/train.sbatch" "${words[@]}")
    jobs[$1]=${job%%;*} # after a semicolon, the cluster
    echo "$run: job ${jobs[$1]}${after:+ after ${after:1}}"
}

runs=$RLHF_SPMD_RUNS/$name
stage sft actor "" --algorithm sft "${sft[@]}"
stage reward reward "sft" --algorithm reward_model --model "$runs-sft/actor" "${reward[@]}"
stage ppo actor "sft reward" --model "$runs-sft/actor" "models.reward=$runs-reward/reward" "${ppo[@]}"
