"""What torch.distributed needs to start: this rank's device, an address to meet at, the store and the process groups.

MPI has introduced the ranks to each other by now; this file only turns that into torch's terms. The meeting point's
port is chosen by the system on the rank that listens, so there is no port to configure and none to race for. Where all
ranks share one network stack everything stays on the loopback interface.
"""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.network import INTERFACE_OPTION

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
CONNECT_S = 60.0


def visible_devices() -> list[str]:
    """The UUIDs of the NVIDIA devices that this process may use, in order, without torch or CUDA; [] if none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    uuids = []
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        if (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0
            and nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(96)) == 0
        ):
            uuids.append(uuid.value.decode())
    nvml.nvmlShutdown()
    return chosen_devices(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))


def chosen_devices(uuids: Sequence[str], chosen: str | None) -> list[str]:
    """Those of `uuids` that CUDA_VISIBLE_DEVICES leaves visible: numbers or beginnings of UUIDs, up to a bad one."""
    if chosen is None:
        return list(uuids)
    visible: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.startswith("MIG-"):
            found = [entry]
        elif entry.isdigit():
            found = list(uuids[int(entry) : int(entry) + 1])
        else:
            found = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if len(found) != 1 or found[0] in visible:
            break
        visible += found
    return visible


def assign_devices(visible: Sequence[Sequence[str]]) -> list[int] | None:
    """For each rank of a node the index, among the devices visible to it, of one that is its own; None if too few.

    Ranks may see all devices of the node or, where the launcher bound them, one each.
    """
    taken: set[str] = set()
    indices = []
    for devices in visible:
        free = [index for index, device in enumerate(devices) if device not in taken]
        if not free:
            return None
        indices.append(free[0])
        taken.add(devices[free[0]])
    return indices


def network_stack() -> str:
    """The same text on two ranks exactly if they can reach each other by loopback."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def interface_addresses() -> dict[str, str]:
    """The IPv4 address of every network interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def choose_interface(peers: Sequence[str]) -> tuple[str, str]:
    """The interface (name, address) to talk to `peers` by: the user's choice, the route to one, or the first.

    A host's own name is no help: many distributions map it to a loopback address.
    """
    addresses = interface_addresses()
    if wanted := os.environ.get(INTERFACE_OPTION):
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
                probe.connect((peer, 9))  # sends nothing; only asks for the route
                address = probe.getsockname()[0]
        except OSError:
            continue
        if address in outward:
            return outward[address], address
    for address, name in outward.items():
        return name, address
    raise UserError(
        f"{socket.gethostname()} has no network interface by which other hosts could reach it; bring one up, or "
        f"name it in {INTERFACE_OPTION}"
    )


def make_store(address: str, timeout_s: float) -> tuple[Any, int]:
    """Rank 0's store, listening on `address` only, and its port."""
    from torch.distributed import TCPStore

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    # torch itself would listen on every interface; it takes over this socket instead
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
    """Any other rank's end of the store."""
    from torch.distributed import TCPStore

    try:
        store = TCPStore(address, port, timeout=timedelta(seconds=min(CONNECT_S, timeout_s)), wait_for_workers=False)
    except RuntimeError as error:
        raise UserError(
            f"{socket.gethostname()} can't reach rank 0 at {address}:{port}; if that is the wrong network, name the "
            f"right interface in {INTERFACE_OPTION} on every host, else let the firewall pass it"
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def make_groups(
    groups: Mapping[str, Sequence[int]], *, store: Any, rank: int, size: int, device_index: int | None, timeout_s: float
) -> dict[str, Any]:
    """Starts torch.distributed and makes every named group, in the order given; names with the same ranks share one.

    A group of one rank is None: it needs no messages. The world group itself stays free for point-to-point messages.
    """
    import torch
    from torch import distributed

    timeout = timedelta(seconds=timeout_s)
    on_device = device_index is not None
    distributed.init_process_group(
        backend="nccl" if on_device else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=torch.device("cuda", device_index) if on_device else None,
    )
    by_ranks: dict[tuple[int, ...], Any] = {}
    for name, ranks in groups.items():
        ranks = tuple(ranks)
        assert ranks and list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < size, (
            f"group {name!r} wants ascending ranks of a world of {size}, not {ranks}"  # torch would sort them silently
        )
        if ranks not in by_ranks:
            by_ranks[ranks] = distributed.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
    return {name: by_ranks[tuple(ranks)] for name, ranks in groups.items()}
