"""Tables of a program's listing in a narrow terminal; what a chain of iterations is told like."""

from dataclasses import replace

import pytest

from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.proof.memory_check import Finding
from rlhf_spmd.plan.text.program_listing import chain_note, show_program, verdict
from tests.chains import moved, weights_of
from tests.programs import make_workload


def chained(layout: str, *, may_chain: bool = True, **options) -> Program:
    workload, cluster = replace(make_workload(), may_chain=may_chain), Cluster.parse(layout)
    placement = load_strategy("separation").place(workload, cluster, chain=True, **options)
    return compile_program(workload, placement, cluster)


def test_who_begins_while_what_still_trains():
    begins = "iterations follow one another: actor_generate of the next one begins on rank"
    assert chain_note(chained("1x4"), "") == f"{begins}s 2-3 while critic still trains"
    in_turn = chained("1x2")
    assert chain_note(in_turn, "") == f"{begins} 1 while critic still trains"
    at_once = moved(in_turn, 1, weights_of(in_turn, "critic"), before="Run actor_generate")
    assert chain_note(at_once, "") == f"{begins} 1 when all models have trained"
    placement = in_turn.placement
    assert chain_note(replace(in_turn, placement=replace(placement, chain=False)), "") == ""
    text = chain_note(chained("1x2", may_chain=False), "checkpoint.every=1")
    assert text == "iterations do not overlap, because all ranks meet after each of them: checkpoint.every=1"
    assert chain_note(chained("1x2", ahead=1), "") == ""


def test_a_list_says_what_belongs_to_the_iteration_before():
    program = chained("1x2")
    text = show_program(program, title="a chain", rank=1)
    for model in ("actor", "critic"):
        number = weights_of(program, model)
        assert f"Wait transfer {number} of the iteration before: weights of {model} to ranks 1" in text
    assert "Agree on metrics of the iteration before" in text
    assert text.count("of the iteration before") == 5


@pytest.mark.parametrize("kinds", [(), ("warning",) * 12, ("error",) * 12 + ("warning",) * 12])
def test_a_verdict_fits_a_terminal(kinds):
    assert len(verdict([Finding(kind, "text") for kind in kinds])) <= 79
