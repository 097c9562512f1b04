# shellcheck shell=bash
# All site-specific settings. Fill them in once, then submit from the repository's root:
#
#     . slurm/env.sh
#     sbatch -N 2 --ntasks-per-node=8 slurm/train.sbatch --preset smollm2 --model FOLDER --strategy flattening
#
# docs/recipes.md has strategies and options for larger models.
#
# Variables that are already set keep their value, which overrides a setting for one job: RLHF_SPMD_LAUNCHER=mpirun
# sbatch ... The jobs read this file again on their nodes.

# Read by sbatch: partition, account, time limit, GPUs of a node. Empty: the site's default.
: "${SBATCH_PARTITION:=}" "${SBATCH_ACCOUNT:=}" "${SBATCH_QOS:=}" "${SBATCH_TIMELIMIT:=}" "${SBATCH_GPUS_PER_NODE:=}"

: "${RLHF_SPMD_MODULES:=}"         # arguments of `module load`, for example "cuda/12.8 gcc/13"
: "${RLHF_SPMD_VENV:=$PWD/.venv}"  # the virtual environment, on a file system that all nodes share
: "${RLHF_SPMD_RUNS:=$PWD/runs}"   # parent of the run folders, on a file system that all nodes share
: "${RLHF_SPMD_LAUNCHER:=srun}"    # srun, or mpirun if Slurm and the MPI library have no common PMI
: "${RLHF_SPMD_PMI:=pmi2}"         # for srun (see srun --mpi=list): pmi2 (MPICH), pmix (Open MPI), cray_shasta (Cray)
: "${RLHF_SPMD_INTERFACE:=}"       # network interface between the nodes, for example ib0; empty: from the routing table

for name in SBATCH_PARTITION SBATCH_ACCOUNT SBATCH_QOS SBATCH_TIMELIMIT SBATCH_GPUS_PER_NODE RLHF_SPMD_INTERFACE; do
    if [[ -n ${!name} ]]; then export "${name?}"; else unset "$name"; fi
done
unset name
export RLHF_SPMD_MODULES RLHF_SPMD_VENV RLHF_SPMD_RUNS RLHF_SPMD_LAUNCHER RLHF_SPMD_PMI
