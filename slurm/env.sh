# shellcheck shell=bash
# All site-specific settings. Fill them in once, then submit from the repository's root:
#
#     . slurm/env.sh
#     sbatch -N 2 --ntasks-per-node=8 slurm/train.sbatch --preset smollm2 --model FOLDER --strategy separation
#
# A variable that is already set keeps its value, so one job may differ: RLHF_SPMD_LAUNCHER=mpirun sbatch ...
# The jobs read this file again on their nodes.

# What sbatch reads itself: where jobs go, how long they may run, what a node has. Empty: the site's default.
: "${SBATCH_PARTITION:=}" "${SBATCH_ACCOUNT:=}" "${SBATCH_QOS:=}" "${SBATCH_TIMELIMIT:=}" "${SBATCH_GPUS_PER_NODE:=}"

: "${RLHF_SPMD_MODULES:=}"         # words for `module load`, for example "cuda/12.8 gcc/13"
: "${RLHF_SPMD_VENV:=$PWD/.venv}"  # the virtual environment, in a folder that all nodes see
: "${RLHF_SPMD_RUNS:=$PWD/runs}"   # parent of the run folders; all nodes see it, too
: "${RLHF_SPMD_LAUNCHER:=srun}"    # srun, or mpirun where Slurm and the MPI library have no PMI in common
: "${RLHF_SPMD_PMI:=pmi2}"         # of srun, see srun --mpi=list: pmi2 (MPICH), pmix (Open MPI), cray_shasta (Cray)
: "${RLHF_SPMD_INTERFACE:=}"       # network interface between the nodes, for example ib0; empty: the route decides

for name in SBATCH_PARTITION SBATCH_ACCOUNT SBATCH_QOS SBATCH_TIMELIMIT SBATCH_GPUS_PER_NODE RLHF_SPMD_INTERFACE; do
    if [[ -n ${!name} ]]; then export "${name?}"; else unset "$name"; fi
done
unset name
export RLHF_SPMD_MODULES RLHF_SPMD_VENV RLHF_SPMD_RUNS RLHF_SPMD_LAUNCHER RLHF_SPMD_PMI
