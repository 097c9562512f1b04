"""The network interfaces on which MPI and torch.distributed listen, and under Slurm MPICH's network layer.

On one node it is loopback, whatever variables of the user's say: what is set for jobs of several nodes must not open a
job of one to the network. On several nodes the user's variables count. MPI carries discovery and small control messages
only, so a slow interface costs nothing.
"""

import fcntl
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.failure.launcher import ON_NODE, number_in

LOOPBACK_INTERFACE = "lo"
INTERFACE_OPTION = "RLHF_SPMD_INTERFACE"
# variables that set the interface: of MPICH's two network layers (UCX, libfabric), and of Open MPI
MPI_VARIABLES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SLURM_NODES = "SLURM_STEP_NUM_NODES"
NETMOD = "MPIR_CVAR_CH4_NETMOD"


def choose_for_mpi(environment: MutableMapping[str, str]) -> None:
    """Sets, before MPI starts, loopback for a job on one node, else the interface that the user names. Raises UserError
    if this host has none of that name.

    Between nodes, MPICH's UCX layer publishes a long address, which Slurm's PMI sometimes cuts at 1,024 characters
    ("value not properly terminated"). The libfabric layer's are short. Builds with one layer ignore the variable.
    """
    if on_one_node(environment):
        environment.update(dict.fromkeys(MPI_VARIABLES, LOOPBACK_INTERFACE))
        return
    check_interfaces(environment, (INTERFACE_OPTION,))
    if interface := environment.get(INTERFACE_OPTION, "").strip():
        for name in MPI_VARIABLES:
            environment.setdefault(name, interface)
    if environment.get("PMI_FD") and "MPI_LOCALNRANKS" not in environment:  # srun's PMI
        environment.setdefault(NETMOD, "ofi")


def choose_for_torch(environment: MutableMapping[str, str], interface: str) -> None:
    """Sets the interface of torch.distributed's backends: loopback, or another where the user names none."""
    for name, value in ((GLOO, interface), (NCCL, f"={interface}")):  # without "=" it is a prefix
        if interface == LOOPBACK_INTERFACE or not environment.get(name, "").strip():
            environment[name] = value


def check_interfaces(environment: Mapping[str, str], names: Sequence[str]) -> None:
    """Raises UserError if one of these variables names no interface of this host that has an address."""
    present = _with_address()
    for name in names:
        text = environment.get(name, "").strip()
        missing = _absent(text, present) if name == NCCL else [each for each in text.split(",") if each not in present]
        if text and missing:
            raise UserError(
                f"{name}={text}, but {socket.gethostname()} has no such network interface with an address "
                f"({', '.join(missing)}); it has {', '.join(present)}"
            )


def interface_addresses() -> dict[str, str]:
    """Returns the IPv4 address of every network interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def _with_address() -> list[str]:
    """Returns the network interfaces that have an address of IPv4 or IPv6."""
    names = set(interface_addresses())
    with suppress(OSError), open("/proc/net/if_inet6", encoding="utf-8") as file:
        names |= {line.split()[-1] for line in file}
    return sorted(names)


def _absent(text: str, present: Sequence[str]) -> list[str]:
    """Says what is absent if NCCL finds no interface: the text is a list of prefixes, or with "=" of names, perhaps
    with ports, of interfaces that it may use or, after "^", that it must not."""
    excludes, text = text.startswith("^"), text.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    wanted = [each.partition(":")[0] for each in text.split(",")]
    found = [one for one in present if any(one == each if exact else one.startswith(each) for each in wanted)]
    left = [one for one in present if one not in found] if excludes else found
    return [] if left else ["all are excluded"] if excludes else wanted


def on_one_node(environment: Mapping[str, str]) -> bool:
    """Returns whether all processes are on this node, according to the launcher; True without a launcher."""
    for names in ON_NODE:
        everywhere, here = (number_in(environment, name) for name in names)
        if everywhere is not None and here is not None:
            return everywhere == here
    if (num_nodes := number_in(environment, SLURM_NODES)) is not None:
        return num_nodes == 1
    return all(number_in(environment, name) is None for names in ON_NODE for name in names)
