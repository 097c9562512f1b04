"""Starts torch.distributed: the network interfaces, the store in which ranks find each other, and the process groups.

The ranks already know each other through MPI. Those of one node keep the store in memory of rank 0.
Those of several reach it at a port that the operating system chooses on rank 0's node, so no port is configured and no
two jobs compete for one.

On one node MPI and torch listen on loopback, whatever variables of the user's say: what is set for jobs of several
nodes must not open a job of one to the network. On several nodes the user's variables count. MPI carries discovery and
small control messages only, so a slow interface costs nothing.
"""

import ctypes
import math
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.layout import HOST
from rlhf_spmd.runtime.failure.launcher import ON_NODE, number_in
from rlhf_spmd.runtime.failure.surroundings import check_answer, reach
from rlhf_spmd.runtime.world.devices import BACKENDS, RankDevice

LOOPBACK_INTERFACE = "lo"
INTERFACE_OPTION = "RLHF_SPMD_INTERFACE"
# variables that set the interface: of MPICH's two network layers (UCX, libfabric), and of Open MPI
MPI_VARIABLES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SLURM_NODES = "SLURM_STEP_NUM_NODES"
NETMOD = "MPIR_CVAR_CH4_NETMOD"
LOOPBACK = "127.0.0.1"
CONNECT_S = 60.0
HEARTBEAT, HEARTBEAT_S = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 480  # after which torch ends a rank, and its default


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


def on_one_node(environment: Mapping[str, str]) -> bool:
    """Returns whether all processes are on this node, according to the launcher; True without a launcher."""
    known = [[number_in(environment, name) for name in names] for names in ON_NODE]
    for everywhere, here in known:
        if everywhere is not None and here is not None:
            return everywhere == here
    num_nodes = number_in(environment, SLURM_NODES)
    return num_nodes == 1 or num_nodes is None and known == [[None, None]] * len(known)


def choose_for_torch(environment: MutableMapping[str, str], interface: str) -> None:
    """Sets the interface of torch.distributed's backends: loopback, or another where the user names none."""
    for name, value in ((GLOO, interface), (NCCL, f"={interface}")):  # without "=" it is a prefix
        if interface == LOOPBACK_INTERFACE or not environment.get(name, "").strip():
            environment[name] = value


def check_interfaces(environment: Mapping[str, str], names: Sequence[str]) -> None:
    """Raises UserError if one of these variables names only interfaces that this host does not have. NCCL's holds
    beginnings of names, perhaps with ports, or after "^" what it must not use, which is not checked."""
    present = sorted(psutil.net_if_addrs())
    for name in names:
        text = environment.get(name, "").strip()
        wanted = [part.lstrip("=").partition(":")[0] for part in text.split(",")]
        begins = name == NCCL and any(interface.startswith(tuple(wanted)) for interface in present)
        if text and not text.startswith("^") and not begins and not {*wanted} <= {*present}:
            raise UserError(
                f"{name}={text}, but {socket.gethostname()} has no such network interface; it has {', '.join(present)}"
            )


def interface_addresses() -> dict[str, str]:
    """Returns the IPv4 address of every network interface that has one."""
    addresses: dict[str, str] = {}
    for name, known in psutil.net_if_addrs().items():
        for address in known:
            if address.family == socket.AF_INET:
                addresses.setdefault(name, address.address)
    return addresses


def network_stack() -> str:
    """Returns a text that is the same on two ranks if and only if they can reach each other by loopback."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def choose_interface(peers: Sequence[str]) -> tuple[str, str]:
    """Chooses the interface (name, address) for communication with `peers`: the user's choice, the route to a peer, or
    the first. The host's own name is not used: many distributions map it to a loopback address.
    """
    addresses = interface_addresses()
    if wanted := os.environ.get(INTERFACE_OPTION, "").strip():
        if wanted not in addresses:
            raise UserError(
                f"{INTERFACE_OPTION}={wanted}, but {socket.gethostname()} has no such network interface with an IPv4 "
                f"address; it has {', '.join(sorted(addresses))}"
            )
        return wanted, addresses[wanted]
    outward = {address: name for name, address in addresses.items() if not address.startswith("127.")}
    for peer in peers:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))  # sends nothing; only determines the route
                address = probe.getsockname()[0]
        except OSError:
            continue
        if address in outward:
            return outward[address], address
    for address, name in outward.items():
        return name, address
    raise UserError(
        f"{socket.gethostname()} has no network interface that other hosts can reach; bring one up, or name it in "
        f"{INTERFACE_OPTION}"
    )


def make_store(address: str, timeout_s: float) -> tuple[Any, int]:
    """Makes rank 0's store, listening on `address` only. Returns it and its port."""
    from torch.distributed import TCPStore

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    # pass the socket, because torch itself would listen on every interface
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_store(address: str, port: int, timeout_s: float) -> Any:
    """Connects another rank to the store."""
    from torch.distributed import TCPStore

    try:
        reach(address, port)  # fails sooner, and with the reason
        store = TCPStore(address, port, timeout=timedelta(seconds=min(CONNECT_S, timeout_s)), wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        why = f" ({error.strerror or error})" if isinstance(error, OSError) else ""
        raise UserError(
            f"{socket.gethostname()} can't reach rank 0 at {address}:{port}{why}; if that is the wrong network, name "
            f"the right interface in {INTERFACE_OPTION} on every host, else allow the connection in the firewall"
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def file_store(world: Any, timeout_s: float) -> Any:
    """Makes a store in memory of rank 0, which asks no server; None if a rank does not see it. Collective."""
    from torch.distributed import FileStore

    made = os.memfd_create("rlhf_spmd_store") if world.rank == 0 else -1
    inode = os.fstat(made).st_ino if world.rank == 0 else 0
    process, number, inode = world.bcast([os.getpid(), made, inode], what="the store")
    descriptor = -1
    with suppress(OSError):  # this rank does not see it, or sees another file by that path
        opened = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        descriptor = opened if os.fstat(opened).st_ino == inode else -1
    if min(world.allgather(descriptor, "opening the store")) < 0:
        return None
    store = FileStore(f"/proc/self/fd/{descriptor}", -1)
    store.set_timeout(timedelta(seconds=timeout_s))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # its end would write into a later file of this number
    return store


def connect_store(world: Any, timeout_s: float) -> Any:
    """Connects all ranks of a World to one store -> this rank's connection. Collective."""
    if world.num_nodes == 1 and world.one_network and (store := file_store(world, timeout_s)) is not None:
        choose_for_torch(os.environ, LOOPBACK_INTERFACE)
        return store
    if not world.one_network:
        check_interfaces(os.environ, (GLOO, NCCL) if world.computes.kind == "cuda" else (GLOO,))
    peers = sorted({host for host in world.hosts if host != world.hosts[0]})
    interface, address = LOOPBACK_INTERFACE, LOOPBACK
    if not world.one_network and world.rank == 0:
        interface, address = choose_interface(peers)
        check_answer(address)
    store, port = make_store(address, timeout_s) if world.rank == 0 else (None, 0)
    address, port = world.bcast([address, port], what="the address of the store")
    if store is None:
        if not world.one_network:
            interface, _ = choose_interface([address])
        store = join_store(address, port, timeout_s)
    choose_for_torch(os.environ, interface)
    if world.num_nodes > 1 or not all(world.allgather(world.positions.shared, "the records")):
        world.positions.store, world.positions.second_store = store.clone(), store.clone()
    return store


def start_groups(
    world: Any,
    groups: Mapping[str, Sequence[int]],
    pairs: Mapping[str | None, Sequence[tuple[int, int]]],
    store: Any,
    timeout_s: float,
) -> dict[str, Any]:
    """Starts torch.distributed, makes the groups, and sends a first message through each connection -> the groups by
    name. Collective."""
    import torch

    made = make_groups(
        groups, store=store, rank=world.rank, size=world.size, device=world.computes, timeout_s=timeout_s
    )
    number = torch.ones(1, device=world.device)
    torch.distributed.all_reduce(number)
    assert number.item() == world.size
    connect_pairs(made, pairs, world.device)
    return made


def make_groups(
    groups: Mapping[str, Sequence[int]], *, store: Any, rank: int, size: int, device: RankDevice, timeout_s: float
) -> dict[str, Any]:
    """Starts torch.distributed and makes every named group, in the given order, each with its own communicators.

    A group of one rank is None. The world group carries the messages between calls, but for rows through host memory:
    their group (layout.HOST) is one of gloo.
    """
    import torch
    from torch import distributed

    timeout = timedelta(seconds=timeout_s)
    if device.kind == "cuda":  # a rank that the driver blocks (it loads a kernel, it frees memory) may wait as long
        os.environ.setdefault(HEARTBEAT, str(max(math.ceil(timeout_s), HEARTBEAT_S)))
    if device.kind == "shared":
        from rlhf_spmd.runtime.world import host_group

        host_group.register()
    distributed.init_process_group(
        backend=BACKENDS[device.kind],
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=torch.device("cuda", device.index) if device.kind == "cuda" else None,  # NCCL connects at once
    )
    process_groups: dict[str, Any] = {}
    for name, ranks in groups.items():
        ranks = tuple(ranks)
        assert ranks and list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < size, (
            f"group {name!r} needs ascending ranks of a world of {size}, not {ranks}"  # torch would sort them silently
        )
        backend = "gloo" if name.partition(" ")[0] == HOST else None
        # torch has ranks outside a group take part in a split of NCCL's communicator, whatever the group's backend
        assert backend is None or len(ranks) == size, f"group {name!r} lacks ranks of a world of {size}"
        alone = len(ranks) == 1
        process_groups[name] = None if alone else distributed.new_group(list(ranks), timeout, backend)
    return process_groups


def connect_pairs(
    groups: Mapping[str, Any], pairs: Mapping[str | None, Sequence[tuple[int, int]]], device: Any
) -> None:
    """Sends a byte each way between the ranks of every pair, before the first iteration: NCCL connects two ranks at
    their first message and blocks the host until both have arrived. pairs: world ranks by group name (None: the world
    group). Collective; every rank passes the same pairs in the same order."""
    import torch
    from torch import distributed

    rank = distributed.get_rank()
    for name, both in pairs.items():
        peers = sorted({peer for pair in both if rank in pair for peer in pair if peer != rank})
        group = groups[name] if name is not None and peers else None
        operations = [
            distributed.P2POp(direction, torch.zeros(1, dtype=torch.uint8, device=device), peer, group=group)
            for peer in peers
            for direction in (distributed.isend, distributed.irecv)
        ]
        for work in distributed.batch_isend_irecv(operations) if operations else ():
            work.wait()
