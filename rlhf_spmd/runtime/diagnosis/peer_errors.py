"""The message of a rank that lost a peer, or waited too long for one, inside an instruction: it names rank, host,
iteration, instruction, group, and the ranks that have not arrived."""

from typing import Any

from rlhf_spmd.plan.program.instructions import Instruction, Program
from rlhf_spmd.runtime.diagnosis.wait_graph import needs_of, places_of, text_of
from rlhf_spmd.runtime.guard.failures import PeerError, is_lost, is_peer_error


def peer_error(
    error: Exception, program: Program, world: Any, data: Any, instruction: Instruction, position: int
) -> Exception:
    """Returns a lost or late peer as a UserError with names; any other error as it is.

    data: of the iteration.
    position: of the instruction in this rank's list.
    """
    if not is_peer_error(error):
        return error
    needs = needs_of(program, world.rank, instruction, places_of(program))
    late, reason = world.stragglers(needs, data.number), str(error).partition("\n")[0]
    place = f"{data.title}, instruction {position}: {text_of(program, instruction)}"
    names = "; ".join(f"rank {rank} on {world.hosts[rank]} last reported: {where}" for rank, where in late.items())
    what = "lost a connection" if is_lost(error) else "gave up waiting"
    return PeerError(
        f"rank {world.rank} on {world.hosts[world.rank]} {what} in {place}: "
        + (names or "all its peers arrived, but a message did not get through")
        + f" ({reason[:120]})",
        lost=is_lost(error),
    )
