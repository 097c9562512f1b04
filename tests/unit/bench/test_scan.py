"""The scan: options against trying all of them, rows against what they are made of, claims that can fail."""

from itertools import product

import pytest

from bench.columns import COLUMNS
from bench.forecast import suites
from bench.forecast.scan import HEURISTIC, machine, row_of, solve
from bench.forecast.suites import SUITES, Case
from bench.forecast.tuning import best_options
from bench.rows import BASELINES, RESULTS, read_rows
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.proof.memory_check import memory

WORKLOAD = make_workload(load("llama-7b", ["rollout_batch=64", "mini_batch=32"]))
A100 = load_calibration("a100-80g")


def brute_force(name: str, cluster: Cluster, grid: dict) -> tuple[float, int]:
    """Returns the shortest forecast of all points that fit, and their number."""
    found = []
    for values in product(*grid.values()):
        try:
            program = load_strategy(name).compile(WORKLOAD, cluster, dict(zip(grid, values, strict=True)))
        except UserError:
            continue
        if not memory(program):
            found.append(forecast(program, A100).makespan_s)
    return min(found), len(found)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("flattening", {"zero": (0, 1, 2, 3), "micro_batch": (1, 4, 16)}),
        ("interleaving1", {"zero": (0, 2, 3), "micro_batch": (2, 8)}),
        (
            "separation",
            {
                "generation_ranks": (2, 4),
                "training_tp": (1, 2, 4),
                "training_pp": (1, 2),
                "zero": (0, 2),
                "recompute": (False, True),
                "generation_tp": (1, 2),
            },
        ),
        (
            "separation",
            {
                "generation_ranks": (2, 4, 6),
                "training_tp": (1, 2),
                "zero": (2, 3),
                "stream": (False, True),
                "chain": (True,),
            },
        ),
        ("reallocation", {"training_tp": (2, 4, 8), "training_pp": (1, 2), "zero": (0, 1), "generation_tp": (1, 2)}),
    ],
)
def test_best_options_are_those_of_trying_all(name, grid):
    cluster = Cluster.parse("1x8", "a100-80g")
    best = best_options(load_strategy(name), WORKLOAD, cluster, A100, grid)
    least_s, num_fit = brute_force(name, cluster, grid)
    assert best.forecast.makespan_s == pytest.approx(least_s)
    assert best.counts["num_fit"] == num_fit and 0 < best.counts["num_forecasts"] <= num_fit
    assert not memory(load_strategy(name).compile(WORKLOAD, cluster, best.options))


def row(strategy: str, **options) -> dict:
    """Returns the row of 7B on one node with given options."""
    case = Case("llama-7b", "1x8", strategy, options, exact=True)
    cluster, calibration = machine(case)
    return row_of(case, solve(case, WORKLOAD, cluster, calibration), WORKLOAD, calibration)


def test_seconds_of_devices_sum_to_an_iteration():
    for found in (row("flattening", zero=3), row("separation", zero=2, generation_tp=2, training_tp=2)):
        assert found["why_not"] == "" and sum(found["device_s"].values()) == pytest.approx(found["iteration_s"])
        assert min(found["device_s"].values()) >= -1e-9
        assert found["samples_per_s"] == pytest.approx(64 / found["iteration_s"])


FILES = {name: RESULTS / f"{'scan' if name == 'all' else name.replace('-', '_')}.jsonl" for name in SUITES}


@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if suite.promised and FILES[name].exists()])
def test_the_committed_rows_keep_what_is_promised(name):
    rows = read_rows(FILES[name])
    claims = SUITES[name].claims(rows)
    assert len(rows) == len(SUITES[name].cases) and [claims[one] for one in SUITES[name].promised] == [
        [] for _ in SUITES[name].promised
    ]


def test_suites_name_what_exists():
    for name, suite in SUITES.items():
        assert len(suite.cases) == len(set(map(repr, suite.cases))), name
        for case in suite.cases:
            load(case.preset, case.overrides, algorithm=case.algorithm)
            cluster, calibration = machine(case)
            assert sum(int(part.split("x")[0]) for part in case.layout.split("+")) == len(cluster.nodes)
            for device in cluster.device_types:
                calibration.require(device)
            if case.strategy not in ("planner", HEURISTIC, *BASELINES):
                grid = {key: values[0] for key, values in suites.grid_of(case.strategy, cluster.num_devices).items()}
                given = {name: one[0] if isinstance(one, tuple) else one for name, one in case.options.items()}
                load_strategy(case.strategy).typed(grid | given)
        if name not in ("all", "quick"):
            assert name.replace("-", "_") in COLUMNS
