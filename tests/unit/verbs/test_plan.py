"""`python -m rlhf_spmd plan`: what it prints, what it writes, what it refuses; and what a run is compared with."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_spmd.__main__ import _parse, main
from rlhf_spmd.command_line import plans
from rlhf_spmd.command_line.fitting_strategies import COMPARED, options_to_try
from rlhf_spmd.command_line.plans import Alternative, Misfit, auto, fitted
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.machines.cluster_calibration import calibration_for
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Machine
from rlhf_spmd.plan.cost.calibration_scaling import Scale, scaled
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import call_s
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.runtime.execute.response_hashes import digests
from rlhf_spmd.runtime.observe.trace import busy_fraction, lanes
from rlhf_spmd.runtime.pictures.forecast_spans import spans_of_forecast
from rlhf_spmd.runtime.profile.calibration_probe import AtHand
from rlhf_spmd.runtime.records.run_folder import RunFolder
from rlhf_spmd.runtime.run.forecast_report import WHOLE, compare, token_counts
from rlhf_spmd.verbs.plan import _check_words
from tests.programs import make_workload as small_workload
from tests.unit.plan.cost.test_seconds import machine
from tests.unit.verbs.test_check import HEAVY

CPU = {
    "version": 1,
    "provenance": "made up",
    "devices": {
        "cpu": {
            "matrix_flops": 5e10,
            "memory_bytes_per_s": 1e10,
            "host_bytes_per_s": 5e9,
            "layer_s": 2e-4,
            "decode_layer_s": 3e-4,
            "num_workers": 2,
        }
    },
    "inside": {"bytes_per_s": 1e9, "latency_s": 1e-4},
    "between": {"bytes_per_s": 1e9, "latency_s": 1e-4},
}
HERE = Machine("p", "d", 2.0, 1, "t")
SMALL = ["--preset", "llama-7b", "--layout", "1x8", "--calibration", "a100-80g", "--method", "two_phase"]


@pytest.fixture
def cpu_file(tmp_path) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CPU), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> tuple[str, dict, Path]:
    """Standard output, last line and module of one planning, in a process of its own."""
    folder = tmp_path_factory.mktemp("plan")
    command = [sys.executable, "-X", "importtime", "-m", "rlhf_spmd", "plan", *SMALL, "--out", str(folder / "mine.py")]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {name for name in imported if name.partition(".")[0] in HEAVY} == set()
    return done.stdout, json.loads(done.stdout.splitlines()[-1]), folder / "mine.py"


def refusal(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1 and found.err.startswith("rlhf_spmd: error: ")
    return found.err


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_plans_stand_beside_the_strategies(planned):
    text, result, _ = planned
    for words in (*COMPARED, "Seconds of each call", "actor_generate", "bubble", "GiB", "products", "memory"):
        assert words in text
    assert result["ok"] is True and set(COMPARED) < set(result["plans"])
    seconds = [value for value in result["plans"].values() if value is not None]
    assert result["forecast_s"] == pytest.approx(min(seconds)) == result["plans"][result["name"]]


def test_the_commands_to_go_on_with_mean_the_same():
    parsed = _parse(["plan", *SMALL, "--algorithm", "my own.py", "--model", "x"])
    words = ["--layout", "1x8", "--device-type", "a100-80g"]
    own = ["--algorithm", "my own.py", "--preset", "llama-7b", "--model", "x"]
    assert _check_words(parsed, Cluster.parse("1x8", "a100-80g")) == [*words, *own]


def test_the_winner_is_a_strategy_with_that_forecast(planned):
    _, result, path = planned
    config, cluster = load("llama-7b"), Cluster.parse("1x8", "a100-80g")
    program = load_strategy(str(path)).compile(make_workload(config), cluster, {})
    found = forecast(program, load_calibration("a100-80g"))
    assert found.makespan_s == pytest.approx(result["forecast_s"])
    source = path.read_text(encoding="utf-8")
    for call, seconds in call_s(found).items():
        assert call == "estimate_advantages" or f"{call:15}  {seconds:<7.4g}" in source
    for command in (["check"], ["format", "--check"]):
        config_file = Path(__file__).parents[3] / "pyproject.toml"
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(config_file), str(path)]
        assert subprocess.run(ruff, capture_output=True, check=False).returncode == 0


def test_the_command_that_it_shows_works(planned, capsys):
    text, _, path = planned
    command = next(line for line in text.splitlines() if line.startswith("  python -m rlhf_spmd check")).split()
    assert main(command[3:]) == 0 and json.loads(capsys.readouterr().out.splitlines()[-1])["strategy"] == path.stem


def test_nothing_is_overwritten_unless_told(planned, capsys, tmp_path):
    _, _, path = planned
    before = path.read_text(encoding="utf-8")
    assert "mine.py exists already; pass --overwrite" in refusal(capsys, *SMALL, "--out", str(path))
    assert path.read_text(encoding="utf-8") == before
    picture = tmp_path / "old.png"
    picture.write_text("old", encoding="utf-8")
    arguments = (*SMALL, "--out", str(tmp_path / "new.py"), "--timeline", str(picture))
    assert "old.png exists already" in refusal(capsys, *arguments) and not (tmp_path / "new.py").exists()


def test_overrides_change_the_plan_and_are_told(capsys, tmp_path, cpu_file, monkeypatch):
    """And so is a budget that was too small for a proof."""
    search = plans.search
    monkeypatch.setattr(plans, "search", lambda *given, **options: replace(search(*given, **options), gap=0.25))
    out, picture = tmp_path / "plans" / "one.py", tmp_path / "one.png"
    words = ["rollout_batch=8", "mini_batch=8"]
    command = ["plan", "--layout", "1x2", "--calibration", cpu_file, "--out", str(out), "--timeline", str(picture)]
    assert main([*command, "--top", "1", "--method", "two_phase", *words]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.endswith("the budget ended before the proof, so one may be missing that is up to 25.0% faster")
    assert len(json.loads(last)["plans"]) == 1 + len(COMPARED)
    assert "Planned with rollout_batch=8 mini_batch=8." in " ".join(out.read_text(encoding="utf-8").split())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_strategy_that_does_not_fit_says_how_many_bytes_are_missing():
    cluster, workload = Cluster.parse("2x8", "a100-80g"), make_workload(load("llama-70b"))
    found = fitted("flattening", workload, cluster, load_calibration("a100-80g"))
    assert isinstance(found, Misfit) and found.note.startswith("does not fit: a device lacks ")
    assert found.missing_bytes > 2**30


def test_a_strategy_is_tried_with_more_sharding_until_it_fits():
    cluster, workload = Cluster.parse("2x8", "a100-80g"), make_workload(load("llama-13b"))
    found = fitted("flattening", workload, cluster, load_calibration("a100-80g"))
    assert isinstance(found, Alternative) and "zero=3" in found.note
    assert fitted("flattening", workload, Cluster.parse("1x2"), machine()).note == ""  # a CPU's memory has no limit


def test_one_rank_cannot_separate():
    found = fitted("separation", small_workload(), Cluster.parse("1x1"), machine())
    assert isinstance(found, Misfit) and "start at least 2 ranks" in found.note


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("layout", ["1x1", "2x8", "4x8"])
def test_the_options_that_are_tried_exist(name, layout):
    strategy, cluster = load_strategy(name), Cluster.parse(layout)
    options = options_to_try(name, make_workload(load("llama-7b")), cluster)
    assert options[0] == {} and all(strategy.typed(one) == one for one in options)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibration", "a100-80"], "unknown calibration 'a100-80' (did you mean 'a100-80g'?)"),
        (["--layout", "2by8"], "layout '2by8' is not of the form NxG"),
        (["--preset", "llama-13"], "unknown preset 'llama-13' (did you mean 'llama-13b'?)"),
        (["--method", "guess"], "invalid choice: 'guess'"),
        (["--top", "0"], "'0' is not a whole number of at least 1"),
        (
            ["strategy.zero=1"],
            "strategy.zero is an option of a strategy, but the planner chooses every layout; drop it",
        ),
        (["--device-type", "h200-141g"], "no calibration of h200-141g is shipped; give --calibration FILE.json"),
        (["--calibration", "a100-80g", "--device-type", "cpu"], "does not know devices of type cpu, only a100-80g"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_is_one_message(capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


def test_a_calibration_of_another_version_is_refused(capsys, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(CPU | {"version": 0}), encoding="utf-8")
    assert "has version 0, this program reads 1; measure it again" in refusal(capsys, "--calibration", str(path))


def test_a_cluster_file_with_a_device_that_was_not_measured_is_refused(capsys, tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text(
        '[[nodes]]\ndevices = 8\ndevice = "a100-80g"\n\n[[nodes]]\ndevices = 8\ndevice = "h100-80g"\n', encoding="utf-8"
    )
    message = refusal(capsys, "--cluster", str(path), "--calibration", "a100-80g", "--preset", "llama-7b")
    assert "a100-80g does not know devices of type h100-80g, only a100-80g; choose another one, or measure" in message
    message = refusal(capsys, "--cluster", str(path), "--preset", "llama-7b")
    assert "no calibration of a100-80g, h100-80g is shipped" in message
    message = refusal(capsys, "--cluster", str(path), "--layout", "2x8")
    assert "drop --layout and --device-type" in message


def test_what_fits_nowhere_says_by_how_much_and_what_would(capsys):
    message = refusal(
        capsys, "--preset", "llama-70b", "--layout", "1x4", "--calibration", "a100-80g", "--method", "two_phase"
    )
    for words in (
        "fits 1x4",
        "75.2 GiB of 80.0 GiB that it may use",
        "would fit with --layout 16x4",
        "reallocation lacks",
    ):
        assert words in message


def test_memory_is_kept_for_evaluations(capsys, tmp_path):
    """`check` has no error about a plan with the options that it was planned with. Before, plans counted only the
    responses of training, which are shorter here."""
    (tmp_path / "held_out.txt").write_text("one prompt\n", encoding="utf-8")
    cluster, out = ["--layout", "1x4", "--preset", "llama-7b"], str(tmp_path / "one.py")
    words = [f"eval.prompts={tmp_path / 'held_out.txt'}", "eval.max_new_tokens=145000"]
    assert main(["plan", *cluster, "--method", "two_phase", "--out", out, *words]) == 0
    assert main(["check", out, *cluster, "--device-type", "a100-80g", *words]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"] is True
    message = refusal(capsys, *cluster, "--method", "two_phase", words[0], "eval.max_new_tokens=180000")
    assert "that fits 1x4 was found" in message and "It would fit with eval.max_new_tokens=90000, or with" in message


def test_a_launcher_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    assert "plan runs in one process, but 2 were started (PMI_SIZE)" in refusal(capsys)


# ---- train --strategy auto -------------------------------------------------------------------------------------------


def test_auto_is_the_same_every_time_and_is_what_its_source_says(tmp_path):
    config, cluster = load("tiny", ["rollout_batch=16", "mini_batch=8"]), Cluster.parse("1x4")
    workload = make_workload(config)
    found, again = (auto(config, workload, cluster, machine(layer_s=1e-4)) for _ in range(2))
    assert found.source == again.source
    (tmp_path / "kept.py").write_text(found.source, encoding="utf-8")
    kept = load_strategy(str(tmp_path / "kept.py")).compile(workload, cluster, {})
    assert kept.fingerprint == found.compile(workload, cluster, {}).fingerprint


def test_auto_needs_a_calibration_and_takes_no_options():
    with pytest.raises(UserError, match="no calibration of h200-141g is shipped; give --calibration"):
        calibration_for(None, Cluster.parse("1x8", "h200-141g"), required=True)
    config, cluster = load("tiny", ["strategy.zero=1"]), Cluster.parse("1x2")
    with pytest.raises(UserError, match="strategy.zero is an option of a strategy"):
        auto(config, make_workload(config), cluster, machine())


def test_the_calibration_of_a_device_is_found_by_its_type(cpu_file):
    assert calibration_for(None, Cluster.parse("1x8", "a100-80g")).name == "a100-80g"
    assert calibration_for(None, Cluster.parse("1x8", "h200-141g")) is None
    assert calibration_for(cpu_file, Cluster.parse("1x2")).name == "mine"
    with pytest.raises(UserError, match="does not know devices of type h100-80g"):
        calibration_for(cpu_file, Cluster.parse("1x2", "h100-80g"))
    assert _parse(["train", "--calibration", "x"]).calibration == "x"


# ---- a forecast as records, and a run against its forecast -----------------------------------------------------------


def example(name: str, size: int, **options):
    workload, cluster = small_workload(mini_batch=8), Cluster.parse(f"1x{size}")
    return load_strategy(name).compile(workload, cluster, options)


def test_records_are_the_forecast():
    calibration = machine(decode_layer_s=1e-6)
    found = forecast(example("separation", 4), calibration)
    all_lanes = lanes(spans_of_forecast(found))
    assert max(span.end_s for lane in all_lanes for span in lane.spans) == pytest.approx(found.makespan_s)
    busy = [busy_fraction(lane.spans, 0.0, found.makespan_s) for lane in all_lanes]
    worked = [0.0] * 4
    for lane in all_lanes:
        worked[lane.rank] = sum(span.end_s - span.start_s for span in lane.spans if span.category == "compute")
    assert busy == pytest.approx([one / found.makespan_s for one in worked])


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [("flattening", 2, {}), ("interleaving1", 4, {}), ("separation", 4, {}), ("flattening", 2, {"zero": 3})],
)
def test_a_run_that_goes_as_forecast_is_measured_so(name, size, options):
    """Spans like those of runtime/execute/executor.py, taken from the forecast itself: each row must then agree with
    it."""
    program, calibration = example(name, size, **options), machine(layer_s=1e-4)
    found = forecast(program, calibration)
    made = []
    for rank, (steps, times) in enumerate(zip(program.instructions, found.times, strict=True)):
        spans = []
        for number, slower in ((0, 9.0), (1, 1.0), (2, 1.0)):  # the first iteration, which does not count, takes longer
            shift = 100.0 * number
            for step, (begin_s, end_s) in zip(steps, times, strict=True):
                kind = "compute" if isinstance(step, Run) else "wait"
                span = [getattr(step, "call", "other"), kind, shift + begin_s * slower, shift + end_s * slower]
                spans.append([*span, number, {}])
        made.append({"rank": rank, "host": "", "spans": spans})
    workload = program.workload
    lengths = ((workload.max_prompt,), (workload.max_response,))
    compared = compare(program, AtHand(calibration, calibration, HERE), made, lengths)
    rows = {row.call: row for row in compared.rows}
    assert rows[WHOLE].forecast_s == pytest.approx(found.makespan_s)
    assert set(rows) == {call for call, s in call_s(found).items() if s > 0} | {WHOLE}
    for row in rows.values():
        assert row.measured_s == pytest.approx(row.forecast_s, rel=1e-6), row
    assert "1.00" in compared.show() and compared.scaled_by == 1 and "It was made on" not in compared.show()


def test_the_table_says_how_the_calibration_was_scaled(tmp_path):
    program, given = example("flattening", 1), replace(machine(), machine=replace(HERE, processor="Other", cores=1.5))
    scale = Scale(2.0, 2.0, 2.0, 1.25)
    found = AtHand(given, scaled(given, "cpu", scale), HERE, scale, probe_s=1.34)
    spans = [[step.call, "compute", 0.0, 1.0, 0, {}] for step in program.instructions[0] if isinstance(step, Run)]
    compared = compare(program, found, [{"rank": 0, "host": "", "spans": spans}], ((5,), (7,)))
    assert compared.scaled_by > 1.5 and compared.whole.forecast_s > compared.as_given_s > 0
    text = compared.show().splitlines()
    scaled_by = f"scaled by {compared.scaled_by:.2f} to this one (p, 2 cores)"
    kinds = "inference 2.00, training 2.00, generation 2.00"
    assert text[2] == f"  It was made on Other, 1.5 cores, and is {scaled_by}"
    assert text[3] == f"  after a probe of 1.3 s: {kinds}, 1.25 ranks at full speed"
    RunFolder(tmp_path).write_values("forecast.json", compared.to_json())
    written = json.loads((tmp_path / "forecast.json").read_text(encoding="utf-8"))
    assert written["scaled_by"] == compared.scaled_by and written["scale"]["num_workers"] == 1.25
    assert (written["made_on"]["processor"], written["here"]["processor"]) == ("Other", "p")
    short = replace(compared, found=AtHand(replace(given, machine=None), given, HERE, why_not="the run was too short"))
    assert "  It was made on another machine, and is not scaled to this one: the run was too short" in short.show()


def test_the_forecast_is_for_the_lengths_of_the_run():
    program = example("flattening", 1)
    answers = [{"rows": digests(np.array([[1, 0]]), np.array([[0, 0]]), torch.tensor([[[5, 6], [7, -1]]]))}]
    assert token_counts(answers, [[1, 2, 3], [4]]) == ((1, 3), (2, 1))
    calibration = machine()
    short = replace(program, workload=replace(program.workload, prompt_lengths=(1, 3), response_lengths=(2, 1)))
    assert forecast(short, calibration).makespan_s < forecast(program, calibration).makespan_s
