"""Finds options with which the shipped strategies fit a cluster: to compare plans with, and for advice in errors."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.memory import least_bytes, most_bytes, offloaded_bytes
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.plan.text.program_listing import format_bytes
from rlhf_spmd.plan.validate import validate
from rlhf_spmd.plan.workload import Workload

COMPARED = ("flattening", "interleaving1", "interleaving2", "separation", "reallocation")
SPLIT = ("separation", "reallocation")  # have separate layouts for training and for the rest
ADAPTERS = "lora.rank=16"  # the usual ones
IN_HOST_MEMORY = {"zero": 1, "recompute": True, "micro_batch": 1, "offload": True, "offload_optimizer": True}
Evaluate = Callable[[Program], Program | None]  # the program of a run's evaluations, from that of its training


def no_evaluation(training: Program) -> None:
    """Stands in for `evaluate` in a run without evaluations."""


def options_to_try(name: str, workload: Workload, cluster: Cluster) -> tuple[dict[str, Any], ...]:
    """Returns the options to try for a strategy, fastest first; later ones shard more, then store fewer activations."""
    if name not in SPLIT:
        halves = [workload.micro_batch >> power for power in range(1, workload.micro_batch.bit_length())]
        smaller = tuple({"zero": 3, "micro_batch": size} for size in halves)
        sliced = {"zero": 3, "tp": workload.largest_tp(cluster), "recompute": True}
        last = (
            (sliced, *(sliced | {"micro_batch": size} for size in halves), IN_HOST_MEMORY)
            if name == "flattening"
            else ()
        )
        return {}, {"zero": 1}, {"zero": 3}, *smaller, *last
    tp = workload.largest_tp(cluster)
    split = {"training_tp": tp, "zero": 1, "recompute": True}
    both = split | {"generation_tp": tp}
    staged = ("training_pp", "generation_pp") + (("inference_pp",) if name == "reallocation" else ())
    depths = [2**power for power in range(1, len(cluster.nodes).bit_length())]
    sharded = ({}, {"zero": 1}, {"zero": 3}) if name == "separation" else ({}, {"zero": 1})
    return *sharded, split, both, *(both | dict.fromkeys(staged, depth) for depth in depths)


def missing_bytes(program: Program, evaluation: Program | None = None) -> int:
    """Returns the largest number of bytes that a rank lacks on its device, beside the reserve, for a program and for
    that of the run's evaluations, or that a host lacks; less than 1 if both fit."""
    missing = []
    for rank in program.cluster.ranks:
        limit = program.cluster.usable_bytes(rank)
        beside = least_bytes(evaluation, rank, program) if evaluation else 0
        if limit is not None:
            missing.append(max(least_bytes(program, rank), beside) - limit)
    hosts = enumerate(node.host_bytes for node in program.cluster.nodes)
    missing += [offloaded_bytes(program, node) - size for node, size in hosts if size is not None]
    return max(missing, default=0)


@dataclass(frozen=True, slots=True)
class Fit:
    """A shipped strategy with the first options with which it fits.

    program: None if it fits with none of the usual options; evaluation: that of the run's evaluations.
    note: the options as words, or why it does not fit.
    """

    options: Mapping[str, Any]
    program: Program | None
    evaluation: Program | None
    note: str


def first_fit(name: str, workload: Workload, cluster: Cluster, evaluate: Evaluate = no_evaluation, **more: Any) -> Fit:
    """Tries the usual options of a shipped strategy, with further ones."""
    strategy, who = load_strategy(name), f"strategy {name}: "
    misfits: list[tuple[int, str]] = []  # bytes that a device lacks, and why
    for options in (tried | more for tried in options_to_try(name, workload, cluster)):
        words = " ".join(f"{option}={value}" for option, value in options.items())
        try:
            placement = strategy.placement(workload, cluster, options)
            validate(placement, workload, cluster)
            # Transfers only add bytes, so a program without them shows most misfits without compiling.
            missing = missing_bytes(Program(workload, placement, cluster, {}, (), ()))
            if missing <= 0:
                program = strategy.compile(workload, cluster, options)
                evaluation = evaluate(program)
                missing = missing_bytes(program, evaluation)
        except UserError as error:  # e.g. too few ranks
            misfits.append((sys.maxsize, str(error).removeprefix(who)))
            continue
        if missing <= 0:
            return Fit(options, program, evaluation, words)
        note = f"does not fit: a device lacks {format_bytes(missing)}"
        misfits.append((missing, f"{note} with {words}" if words else note))
    return Fit({}, None, None, min(misfits)[1])


def fitting_options(workload: Workload, cluster: Cluster, evaluate: Evaluate = no_evaluation) -> Iterator[str]:
    """Yields, for each shipped strategy that fits with some options, --strategy and the first fitting options as words
    of a command line. These shard as little as possible."""
    return (words for words, _ in _fits(workload, cluster, evaluate))


def _fits(workload: Workload, cluster: Cluster, evaluate: Evaluate) -> Iterator[tuple[str, Program]]:
    """Yields the same words, with the programs."""
    for name in COMPARED:
        fit = first_fit(name, workload, cluster, evaluate)
        if fit.program:
            options = [f"strategy.{key}={value}" for key, value in fit.options.items()]
            yield " ".join([f"--strategy {name}", *options]), fit.program


def advice(
    program: Program, evaluate: Evaluate = no_evaluation, with_adapters: Callable[[], Workload | None] = lambda: None
) -> str:
    """Returns strategies that fit if a program, or that of the run's evaluations, is too large for its devices; else
    empty.

    with_adapters: returns the run's workload with ADAPTERS, which is tried if nothing else fits; None: that is no way.
    """
    if missing_bytes(program, evaluate(program)) <= 0:
        return ""
    cluster = program.cluster
    if strategies := list(fitting_options(program.workload, cluster, evaluate)):
        return "These fit (--strategy auto plans the fastest): " + "; ".join(strategies)
    nothing = "No shipped strategy fits these devices with any of its usual options"
    workload = with_adapters()
    fits = _fits(workload, cluster, evaluate) if workload else ()
    if strategies := [f"{words} ({format_bytes(most_bytes(fitting))})" for words, fitting in fits]:
        return f"{nothing}. These fit with {ADAPTERS}, which trains adapters alone: {'; '.join(strategies)}"
    return f"{nothing}: use more or larger devices"


def compile_all(
    names: Sequence[str], workload: Workload, cluster: Cluster, options: Mapping[str, Any]
) -> dict[str, Program]:
    """Compiles the program of each strategy; each gets those options that it has. Raises UserError for an option that
    none has, and for an error of `check` other than too little memory."""
    strategies = {name: load_strategy(name) for name in dict.fromkeys(names)}
    for option in options:
        if not any(option in strategy.parameters for strategy in strategies.values()):
            next(iter(strategies.values())).typed({option: options[option]})  # raises
    programs = {}
    for name, strategy in strategies.items():
        known = {option: value for option, value in options.items() if option in strategy.parameters}
        programs[name] = program = strategy.compile(workload, cluster, known)
        misfits = memory(program)
        for finding in check(program):
            if finding.severity == "error" and finding not in misfits:
                raise UserError(f"strategy {name}: {finding}; python -m rlhf_spmd check {name} shows all of it")
    return programs
