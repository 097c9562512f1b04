"""Chooses, before MPI starts, the network interface on which it listens (by default the machine's first address), and
under Slurm MPICH's network layer.

MPI carries discovery and small control messages only, so a slow interface costs nothing.
"""

from collections.abc import Mapping, MutableMapping

from rlhf_spmd.runtime.guard.launcher import ON_NODE, number_in

LOOPBACK_INTERFACE = "lo"
INTERFACE_OPTION = "RLHF_SPMD_INTERFACE"
# variables that set the interface: of MPICH's two network layers (UCX, libfabric), and of Open MPI
MPI_VARIABLES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")
SLURM_NODES = "SLURM_STEP_NUM_NODES"
NETMOD = "MPIR_CVAR_CH4_NETMOD"


def choose_for_mpi(environment: MutableMapping[str, str]) -> None:
    """Sets loopback for a job on one node, else the interface that the user names; existing settings are kept.

    Between nodes, MPICH's UCX layer publishes a long address, which Slurm's PMI sometimes cuts at 1,024 characters
    ("value not properly terminated"). The libfabric layer's are short. Builds with one layer ignore the variable.
    """
    interface = LOOPBACK_INTERFACE if on_one_node(environment) else environment.get(INTERFACE_OPTION, "").strip()
    if interface:
        for name in MPI_VARIABLES:
            environment.setdefault(name, interface)
    is_srun = environment.get("PMI_FD") and "MPI_LOCALNRANKS" not in environment
    if is_srun and not on_one_node(environment):
        environment.setdefault(NETMOD, "ofi")


def on_one_node(environment: Mapping[str, str]) -> bool:
    """Whether all processes are on this node, according to the launcher; True without a launcher."""
    for names in ON_NODE:
        everywhere, here = (number_in(environment, name) for name in names)
        if everywhere is not None and here is not None:
            return everywhere == here
    if (num_nodes := number_in(environment, SLURM_NODES)) is not None:
        return num_nodes == 1
    return all(number_in(environment, name) is None for names in ON_NODE for name in names)
