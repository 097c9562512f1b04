# shellcheck shell=bash
# Shared by all job scripts: sets the environment of a job and the launcher of its MPI ranks. Source it after env.sh.

if [[ -n $RLHF_SPMD_MODULES ]]; then
    # shellcheck disable=SC2086  # several words
    module load $RLHF_SPMD_MODULES
fi
if [[ ! -x $RLHF_SPMD_VENV/bin/python ]]; then
    echo "slurm: there is no $RLHF_SPMD_VENV/bin/python on $(hostname): set RLHF_SPMD_VENV in $RLHF_SPMD_SITE" >&2
    exit 2
fi
export PATH="$RLHF_SPMD_VENV/bin:$PATH"
unset SLURM_EXPORT_ENV # so that a job submitted with --export=NONE still passes its own environment to its ranks
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it from sbatch
fi
if [[ -n ${RLHF_SPMD_INTERFACE:-} ]]; then
    export HYDRA_IFACE=$RLHF_SPMD_INTERFACE # for MPICH's mpirun and its proxies on other nodes
fi

# shellcheck disable=SC2034  # the scripts use it
case $RLHF_SPMD_LAUNCHER in
# without --kill-on-bad-exit the other ranks would wait for a dead one
srun) launcher=(srun "--mpi=$RLHF_SPMD_PMI" --kill-on-bad-exit=1) ;;
mpirun) launcher=(mpirun -n "$SLURM_NTASKS") ;;
*)
    echo "slurm: RLHF_SPMD_LAUNCHER=$RLHF_SPMD_LAUNCHER is neither srun nor mpirun" >&2
    exit 2
    ;;
esac
if [[ -n $RLHF_SPMD_CONTAINER ]]; then
    export APPTAINERENV_PREPEND_PATH=$RLHF_SPMD_VENV/bin # a container has a PATH of its own
    read -ra container <<<"$RLHF_SPMD_CONTAINER"
    launcher+=("${container[@]}")
fi
