"""With which options the shipped strategies fit a cluster: what plans are compared with, and what an error advises."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.memory import least_bytes
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.strategy import load_strategy

BESIDE = ("flattening", "interleaving1", "interleaving2", "separation", "reallocation")
SPLIT = ("separation", "reallocation")  # have layouts of their own for training and for the rest


def options_of(name: str, workload: Workload, cluster: Cluster) -> tuple[Mapping[str, Any], ...]:
    """What is tried of a strategy, the fastest where it fits first: more sharding, then fewer activations."""
    if name not in SPLIT:
        halves = [workload.micro_batch >> power for power in range(1, workload.micro_batch.bit_length())]
        return {}, {"zero": 1}, {"zero": 3}, *({"zero": 3, "micro_batch": size} for size in halves)
    tp = workload.largest_tp(cluster)
    split = {"training_tp": tp, "zero": 1, "recompute": True}
    both = split | {"generation_tp": tp}
    staged = ("training_pp", "generation_pp") + (("inference_pp",) if name == "reallocation" else ())
    depths = [2**power for power in range(1, len(cluster.nodes).bit_length())]
    sharded = ({}, {"zero": 1}, {"zero": 3}) if name == "separation" else ({}, {"zero": 1})
    return *sharded, split, both, *(both | dict.fromkeys(staged, depth) for depth in depths)


def missing_bytes(program: Program) -> int:
    """How many more bytes a device would have to hold, of the rank that lacks most; less than 1 if the program fits."""
    limits = [(rank, program.cluster.device_bytes(rank)) for rank in program.cluster.ranks]
    return max((least_bytes(program, rank) - limit for rank, limit in limits if limit is not None), default=0)


def what_fits(workload: Workload, cluster: Cluster) -> Iterator[str]:
    """For each shipped strategy that fits with some options, the words of a command line: --strategy and the first of
    them. What comes first shards least."""

    def fits(name: str, options: Mapping[str, Any]) -> bool:
        try:
            program = load_strategy(name).compile(workload, cluster, options)
        except UserError:  # too few ranks for it, say
            return False
        return not any(finding.severity == "error" for finding in memory(program))

    for name in BESIDE:
        tried = options_of(name, workload, cluster)
        if name not in SPLIT and not fits(name, tried[-1]):  # the smallest of all
            continue
        found = next((options for options in tried if fits(name, options)), None)
        if found is not None:
            yield " ".join([f"--strategy {name}", *(f"strategy.{key}={value}" for key, value in found.items())])


def advice(program: Program) -> str:
    """What fits instead of a program that is too large for its devices; empty if that is not what is wrong with it."""
    if not any(finding.severity == "error" for finding in memory(program)):
        return ""
    found = list(what_fits(program.workload, program.cluster))
    if not found:
        return "No shipped strategy fits these devices with any of its usual options: use more of them, or larger ones"
    return "These fit (--strategy auto plans the fastest): " + "; ".join(found)
