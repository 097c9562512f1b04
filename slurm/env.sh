# shellcheck shell=bash
# Reads the settings of a site, and gives the others their defaults. Source it, then submit from any folder:
#
#     . path/to/slurm/env.sh
#     sbatch -N 2 --ntasks-per-node=8 "$RLHF_SPMD_SLURM/train.sbatch" --model FOLDER --strategy flattening
#
# Your settings are lines NAME=VALUE in a file of your own, ~/.config/rlhf_spmd/site.sh or the one in RLHF_SPMD_SITE.
# Variables that are already set take precedence over it, for one job: RLHF_SPMD_LAUNCHER=mpirun sbatch ... The jobs
# read this file again on their nodes. docs/recipes.md has strategies and options for larger models.

RLHF_SPMD_SLURM=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${RLHF_SPMD_SITE:=${XDG_CONFIG_HOME:-${HOME:-}/.config}/rlhf_spmd/site.sh}"
if [[ -f $RLHF_SPMD_SITE ]]; then
    given=$(declare -p | grep -E '^declare -[-x]+ (SBATCH_|RLHF_SPMD_)\w+="[^"]' || true)
    # shellcheck source=/dev/null
    . "$RLHF_SPMD_SITE"
    eval "$given"
    unset given
fi

# Read by sbatch: partition, account, time limit, GPUs of a node. Empty: the site's default.
: "${SBATCH_PARTITION:=}" "${SBATCH_ACCOUNT:=}" "${SBATCH_QOS:=}" "${SBATCH_TIMELIMIT:=}" "${SBATCH_GPUS_PER_NODE:=}"

: "${RLHF_SPMD_MODULES:=}"                         # arguments of `module load`, for example "cuda/13.0 gcc/13"
: "${RLHF_SPMD_VENV:=${RLHF_SPMD_SLURM%/*}/.venv}" # the virtual environment, on a file system that all nodes share
: "${RLHF_SPMD_RUNS:=$PWD/runs}"                   # parent of the run folders, on a file system that all nodes share
: "${RLHF_SPMD_LAUNCHER:=srun}"                    # srun, or mpirun if Slurm and the MPI library have no common PMI
: "${RLHF_SPMD_PMI:=pmi2}"      # for srun (see srun --mpi=list): pmi2 (MPICH), pmix (Open MPI), cray_shasta (Cray)
: "${RLHF_SPMD_INTERFACE:=}"    # network interface between the nodes, for example ib0; empty: from the routing table
: "${RLHF_SPMD_CONTAINER:=}"    # command before python, for example "apptainer exec --nv IMAGE.sif"; empty: none

for name in SBATCH_PARTITION SBATCH_ACCOUNT SBATCH_QOS SBATCH_TIMELIMIT SBATCH_GPUS_PER_NODE RLHF_SPMD_INTERFACE; do
    if [[ -n ${!name} ]]; then export "${name?}"; else unset "$name"; fi
done
unset name
export RLHF_SPMD_SLURM RLHF_SPMD_SITE RLHF_SPMD_MODULES RLHF_SPMD_VENV RLHF_SPMD_RUNS RLHF_SPMD_LAUNCHER RLHF_SPMD_PMI
export RLHF_SPMD_CONTAINER
