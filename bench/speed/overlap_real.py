"""What overlap across iterations gains with real computation: separation on two ranks, one pinned thread each.

PPO of the embedded models; every response has the same length, so iterations are alike. Programs without and with
overlap alternate in the same processes. `simulated_s` is the iteration that simulate() says for each program from the
median seconds of each of its Runs, which wait for no other rank.

ahead-real: the next batch is drawn one iteration ahead. Lengths and batches are such that generation and inference on
    one rank take about as long as both epochs of training on the other.
chain-real: iterations follow one another, with the same numbers. The critic starts from the actor and is as large, and
    training it takes about as long as generation. Measured are blocks of ten iterations, divided by ten. A block begins
    and ends with a meeting of both ranks, as between two checkpoints, so its seconds include what filling and draining
    the chain costs; `simulated_s` is the period of a chain without end.

Cost: three minutes each on two otherwise idle cores. Command: python -m bench ahead-real (chain-real)
"""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.ranks import rows_of_ranks
from bench.rows import Arguments, write
from bench.speed.overlap import Iteration, Runner, seconds_of, write_random
from bench.tables import ended
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.simulate import Times, simulate
from rlhf_spmd.plan.program.ahead import is_late
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.program.transfers import communicators

NUM_RANKS = 2
WARM_UP = 2  # blocks
LEAST_SHARE = 0.9  # of the gain that simulate gives


@dataclass(frozen=True, slots=True)
class Part:
    """A bench of this file.

    variants: options of the strategy: some without overlap and the one with it.
    tokens: of every response.
    num: iterations of a block.
    least, least_simulated: of the gain over the fastest variant without overlap.
    """

    variants: tuple[dict[str, Any], ...]
    epochs: int
    tokens: int
    words: tuple[str, ...]
    num: int
    num_blocks: int
    least: float
    least_simulated: float = 1.0

    def options(self, more: Sequence[str]) -> list[str]:
        """Returns the options of the run."""
        lengths = [f"generation.max_new_tokens={self.tokens}", f"generation.min_new_tokens={self.tokens}"]
        return ["rollout_batch=8", "num_samples=0", f"ppo.epochs={self.epochs}", *lengths, *self.words, *more]


AHEAD = (*({"decode_mini_batches": num, "chain": False} for num in (2, 4)), {"ahead": 1})
CHAIN = ({"chain": False}, {"chain": True})
MINI_BATCH = ("mini_batch=8", "micro_batch=4")
PARTS = {
    "ahead-real": Part(AHEAD, 2, 64, ("mini_batch=2", "micro_batch=2"), num=1, num_blocks=9, least=1.3),
    "chain-real": Part(CHAIN, 2, 96, MINI_BATCH, num=10, num_blocks=5, least=1.25, least_simulated=1.35),
}
CRITIC_LAYERS = 12


def large_critic(folder: Path) -> None:
    """Writes a critic as wide as the actor and three times as deep."""
    write_random("actor", "scalar", folder / "critic", num_layers=CRITIC_LAYERS)


def run_cases(world: Any, folder: Path, name: str, *more: str) -> list[dict]:
    """Runs the case on each rank."""
    part, critic = PARTS[name], [f"models.critic={folder / 'critic'}"] if name == "chain-real" else []
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[world.rank]})
    config = load("tiny", part.options([*critic, *more]))
    workload, cluster = make_workload(config), Cluster.parse(f"1x{world.size}")
    programs = [load_strategy("separation").compile(workload, cluster, options) for options in part.variants]
    world.start_torch(*communicators(programs), threads=1)
    runners = [Runner(config, program, world) for program in programs]
    starts = range(0, (WARM_UP + part.num_blocks) * part.num, part.num)
    rounds = [[runner.block(range(first, first + part.num)) for runner in runners] for first in starts]
    about, rows = {"bench": name.replace("-", "_"), "epochs": part.epochs, "tokens": part.tokens}, []
    for program, blocks in zip(programs, zip(*rounds, strict=True), strict=True):
        everyone = world.allgather(blocks[WARM_UP:], "the seconds")
        rows.append(about | row_of(program, list(zip(*everyone, strict=True))))
    return rows


def row_of(program: Program, blocks: Sequence[Sequence[Iteration]]) -> dict[str, Any]:
    """Returns measured and simulated seconds of an iteration.

    blocks: of each rank: seconds of each iteration, and of each of its Runs.
    """
    found: dict[tuple[int, Run], list[float]] = {}
    for iteration in (iteration for block in blocks for iteration in zip(*block, strict=True)):
        for run, took_s in seconds_of(program, iteration).items():
            found.setdefault(run, []).append(took_s)
    run_s = {key: statistics.median(seconds) for key, seconds in found.items()}
    halves = [sum(s for (_, run), s in run_s.items() if is_late(program, run) is not drawn) for drawn in (True, False)]
    each_s = [max(sum(s for s, _ in of_rank) / len(of_rank) for of_rank in block) for block in blocks]
    placement = program.placement
    return {
        "ahead": placement.ahead,
        "chain": placement.chain,
        "decode_mini_batches": None if placement.ahead else placement.decode_mini_batches,
        "drawing_s": halves[0],
        "training_s": halves[1],
        "simulated_s": simulate(program, Times(lambda rank, run: run_s[rank, run])).makespan_s,
        "measured_s": statistics.median(each_s),
        "seconds": each_s,
    }


def judge(rows: list[dict[str, Any]], part: Part) -> bool:
    """Adds to each row without overlap what overlap gains over it, measured and simulated -> whether the goals are met
    over the fastest of them."""
    *others, last = rows
    for row in others:
        row["gain"], row["gain_simulated"] = (row[kind] / last[kind] for kind in ("measured_s", "simulated_s"))
    fastest = min(others, key=lambda row: row["measured_s"])
    simulated = fastest["gain_simulated"]
    return fastest["gain"] >= max(part.least, LEAST_SHARE * simulated) and simulated >= part.least_simulated


def main(arguments: list[str]) -> int:
    name, *arguments = arguments
    parser = Arguments(name, __doc__)
    parser.add_argument("options", nargs="*", help="KEY=VALUE")
    rows = rows_of_ranks(__name__, NUM_RANKS, name, *parser.parse_args(arguments).options, inputs=large_critic)
    ok = judge(rows, PARTS[name])
    write(name.replace("-", "_"), [row | {"ok": ok} for row in rows])
    return ended(name, rows, ok=ok)
