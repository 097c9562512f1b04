"""Where MPI's own sockets listen, which must be said before MPI starts: by itself it takes the machine's first address.
And by which of MPICH's network layers, where Slurm starts the ranks.

MPI carries discovery and small control messages only, so an interface that is slower than the best one costs nothing.
"""

from collections.abc import Mapping, MutableMapping

LOOPBACK_INTERFACE = "lo"
INTERFACE_OPTION = "RLHF_SPMD_INTERFACE"
# by which the libraries are told an interface: MPICH's two network layers (UCX, libfabric), and Open MPI
MPI_VARIABLES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")
# how many processes a launcher started, and how many of them on this node; the nearest launcher comes first
PROCESSES = (("PMI_SIZE", "MPI_LOCALNRANKS"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
SLURM_NODES = "SLURM_STEP_NUM_NODES"
NETMOD = "MPIR_CVAR_CH4_NETMOD"


def choose_for_mpi(environment: MutableMapping[str, str]) -> None:
    """Loopback for a job on one node, else the interface that the user names; what is set already stays.

    Between nodes, MPICH's UCX layer publishes its address with 4 KB of the memory behind it, as hexadecimal text in
    which only zeros are short, and Slurm's PMI cuts lines at 1,024 characters: now and then nobody would start ("value
    not properly terminated"). An address of the libfabric layer is short. Builds with one layer ignore the variable.
    """
    interface = LOOPBACK_INTERFACE if on_one_node(environment) else environment.get(INTERFACE_OPTION)
    if interface:
        for name in MPI_VARIABLES:
            environment.setdefault(name, interface)
    if "PMI_FD" in environment and "MPI_LOCALNRANKS" not in environment and not on_one_node(environment):
        environment.setdefault(NETMOD, "ofi")  # the launcher is srun


def on_one_node(environment: Mapping[str, str]) -> bool:
    """Whether the launcher says that all processes are on this node; also true without a launcher."""
    for everywhere, here in PROCESSES:
        if everywhere in environment and here in environment:
            return environment[everywhere] == environment[here]
    if SLURM_NODES in environment:
        return environment[SLURM_NODES] == "1"
    return not any(name in environment for names in PROCESSES for name in names)
