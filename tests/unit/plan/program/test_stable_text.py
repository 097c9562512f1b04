"""The text behind a program's fingerprint: which changes of the code it does not see, and what it tells apart."""

from dataclasses import dataclass, field, make_dataclass, replace

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.stable_text import stable_text


@dataclass(frozen=True)
class Value:
    name: str
    parts: tuple[int, ...] = ()
    known: dict = field(default_factory=dict)
    cached: int = field(default=0, compare=False)


def test_names_of_classes_and_new_fields_change_nothing():
    other = make_dataclass("Other", [("name", str), ("parts", tuple, ()), ("known", dict, None), ("more", int, 3)])
    assert stable_text(Value("a", cached=5)) == stable_text(other("a")) == "(name='a')"
    assert stable_text(Value("a", (1, 2))) == stable_text(other("a", (1, 2))) == "(name='a', parts=[1, 2])"
    assert stable_text(other("a", more=4)) == "(name='a', more=4)"


def test_programs_are_told_apart():
    workload = make_workload(presets.load("tiny", []))
    strategies = [load_strategy(name) for name in ("flattening", "separation")]
    clusters = [Cluster.parse("1x4"), Cluster.parse("2x2")]
    found = {one.compile(workload, cluster, {}).fingerprint for one in strategies for cluster in clusters}
    found |= {strategies[0].compile(replace(workload, epochs=3), clusters[0], {}).fingerprint}
    found |= {strategies[0].compile(workload, clusters[0], {"zero": 1}).fingerprint}
    assert len(found) == 6
