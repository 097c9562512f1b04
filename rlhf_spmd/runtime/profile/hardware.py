"""Measures a device (matrix products, memory) and its links (collectives, messages) for the profile subcommand."""

from functools import partial

import torch
import torch.distributed as dist

from rlhf_spmd.model.parallel import all_gather_rows
from rlhf_spmd.plan.layout import HOST, group_name
from rlhf_spmd.runtime.profile.clock import Clock
from rlhf_spmd.runtime.profile.measured_sizes import MESSAGE_BYTES

SIZE = {"cpu": 512, "cuda": 8192}  # of a square matrix
READ_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # more than fits the caches
NUMBERS = {2: torch.bfloat16, 4: torch.float32}  # by bytes of a weight


def constants(clock: Clock, param_bytes: int) -> dict[str, float]:
    """Measures matrix_flops, memory_bytes_per_s and host_bytes_per_s of a Device."""
    device, dtype = clock.world.device, NUMBERS[param_bytes]
    size, num_bytes = SIZE[device.type], READ_BYTES[device.type]
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    (product_s,) = clock.seconds(lambda: matrix @ matrix)
    memory = torch.ones(num_bytes // 4, device=device)
    (read_s,) = clock.seconds(memory.sum)
    host = torch.ones(num_bytes // 4, pin_memory=device.type == "cuda")
    (load_s,) = clock.seconds(lambda: memory.copy_(host))
    return {
        "matrix_flops": 2 * size**3 / product_s,
        "memory_bytes_per_s": num_bytes / read_s,
        "host_bytes_per_s": num_bytes / load_s,
    }


def links(clock: Clock, groups: list[tuple[int, ...]]) -> list[tuple[int, float, float]]:
    """Measures (ranks, bytes, seconds) of all-gathers, and of equivalent operations: half an all-reduce; between two
    ranks, one message."""
    world = clock.world
    points: list[tuple[int, float, float]] = []
    for ranks in groups:
        mine, nodes = world.rank in ranks, [world.nodes[rank] for rank in ranks]
        group = world.group(group_name(ranks)) if mine else None
        here = max(nodes.count(node) for node in nodes)
        for num_bytes in MESSAGE_BYTES:
            whole = torch.zeros(num_bytes // 4, device=world.device)
            part = whole[: max(len(whole) // len(ranks), 1)]
            works = [partial(dist.all_reduce, whole, group=group), partial(all_gather_rows, part, group)]
            reduce_s, gather_s = clock.seconds(*works, idle=not mine, together=here)
            points += [(len(ranks), num_bytes, reduce_s / 2), (len(ranks), num_bytes, gather_s)]
            if len(ranks) == 2:
                points.append(_message(clock, whole, ranks, here))
    return points


def host_messages(clock: Clock, ranks: tuple[int, ...]) -> list[tuple[int, float, float]]:
    """Measures (ranks, bytes, seconds) of messages through host memory between two ranks."""
    group = clock.world.group(group_name(range(clock.world.size), HOST))
    buffers = [torch.zeros(num_bytes // 4, pin_memory=clock.world.device.type == "cuda") for num_bytes in MESSAGE_BYTES]
    return [_message(clock, buffer, ranks, 2, group) for buffer in buffers]


def _message(
    clock: Clock, buffer: torch.Tensor, ranks: tuple[int, ...], here: int, group: dist.ProcessGroup | None = None
) -> tuple[int, float, float]:
    """Measures a message between the first two ranks and one back: (ranks, bytes, seconds of one).

    here: how many of them are on one node.
    group: of all ranks; None: the world.
    """
    works = [partial(_ping_pong, buffer, ranks, group)]
    (both_s,) = clock.seconds(*works, idle=clock.world.rank not in ranks, together=here)
    return 2, 2 * buffer.nbytes, both_s / 2


def _ping_pong(buffer: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup | None = None) -> None:
    """Sends a message from the first to the second rank, and one back.

    group: of all ranks; None: the world.
    """
    first = dist.get_rank() == ranks[0]
    peer = ranks[1] if first else ranks[0]
    for operation in (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend):
        for work in dist.batch_isend_irecv([dist.P2POp(operation, buffer, peer, group)]):
            work.wait()
