"""The steps of `python -m bench first-light` that ask whether everything is correct on this device."""

# R requests, G longest response, P longest prompt

import gc
import importlib.util
import json
import math
import os
import sys
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

from bench.first_light.steps import Found, Light
from bench.rows import REPOSITORY, rows_at
from tests.run_mpi import Counter, mpi_command, run_limited

DECODE_TESTS = ("decode_attention", "kv_write", "rmsnorm", "rope", "silu_mul")
KERNEL_TESTS = (*DECODE_TESTS, "sample_kernel", "token_logprobs")  # use the fixture `device`
SHARED_TESTS = "tests/gpu/test_shared_device.py"  # what the step `shared` does, for fewer strategies
WORKERS = 6  # processes of pytest on a GPU
FEW, LAST_CHARACTERS = 3, 1500  # names of failed tests that are told; what is shown of a failure when it happens
ROWS, LIMIT = 256, 24  # requests of the embedded model, tokens of a response
STRATEGIES = ("flattening", "separation", "reallocation", "interleaving1", "interleaving2")
PARITY_NATS = 0.1  # between generation and training in bfloat16, of a token on average
SMALL = ("iterations=2", "rollout_batch=16", "mini_batch=8", "num_samples=0")
RUN_S = 120.0  # of one run of the program


# ---- tests of pytest -------------------------------------------------------------------------------------------------


class Outcomes(Counter):
    """Tells each failure at once, since pytest may be stopped before its end."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report):
        super().pytest_runtest_logreport(report)
        if report.outcome == "failed":
            self.names.append(report.nodeid)
            print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-LAST_CHARACTERS:]}", flush=True)

    def pytest_collectreport(self, report):
        """Notes a file that can't be imported."""
        if report.outcome == "failed":
            self.names.append(report.nodeid)


def gpu_tests(light: Light) -> Found:
    """Collects the tests of GPUs; on a CPU they skip themselves."""
    return tested(light, ["tests/gpu", f"--ignore={SHARED_TESTS}"], least=0 if light.dry else 1)


def kernel_tests(light: Light) -> Found:
    names = DECODE_TESTS[-1:] if light.dry else KERNEL_TESTS
    return tested(light, [*(f"tests/unit/kernels/test_{name}.py" for name in names)], least=1)


def tested(light: Light, arguments: list[str], *, least: int) -> Found:
    """Runs pytest to its end, whatever fails. least: how many tests must pass."""
    import pytest

    os.chdir(REPOSITORY)
    counter = Outcomes()
    own = ["-p", "no:cacheprovider", "-m", "not slow", "-rf", "--tb=short", "--color=no"]
    if importlib.util.find_spec("xdist") and not light.dry:
        own += ["-n", str(WORKERS)]
    status = pytest.main([*own, *arguments], plugins=[counter])
    counts = counter.counts
    light.row(tests=arguments, **counts, names=counter.names)
    ok = counts["failed"] == 0 and counts["passed"] >= least and status in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    told = ", ".join(f"{num} {outcome}" for outcome, num in counts.items())
    if not ok:
        told += f": {', '.join(counter.names[:FEW])}" if counter.names else f"; pytest ended with status {int(status)}"
    return Found(ok, told)


# ---- the engine ------------------------------------------------------------------------------------------------------


def embedded_model(where: str):
    """Returns the embedded actor in float32, for generation."""
    import torch

    from rlhf_spmd import embedded
    from rlhf_spmd.model.hf import load_model

    folder = embedded.path_of("actor")
    return load_model(folder, head="lm", dtype=torch.float32, device=where).eval().requires_grad_(False)


def prompts_of(num: int) -> list[list[int]]:
    """Returns prompts of 2 to 31 tokens."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.integers(3, 1024, 2 + (7 * i) % 30).tolist() for i in range(num)]


def engine_of(model, num: int, **settings):
    from rlhf_spmd.runtime.generation.engine import Engine

    settings = {"max_sequences": num} | settings
    return Engine(model, longest=32 + LIMIT, eos_ids=(2,), **settings)


def responses(engine, prompts: list[list[int]]):
    """Returns responses_RG and logprobs_RG, on the CPU."""
    from bench.speed.requests import submit

    numbers = submit(engine, prompts, [LIMIT] * len(prompts))
    engine.run()
    responses_RG, logprobs_RG, _ = engine.results(numbers)
    return responses_RG.cpu(), logprobs_RG.cpu()


def by_kernels_and_graphs(model, num: int) -> dict:
    """Returns the responses of a model whose kernels are launched one by one, and of graphs."""
    prompts = prompts_of(num)
    with patch("rlhf_spmd.runtime.generation.cuda_graphs.can_capture", lambda model, device: False):
        found = {"kernels one by one": responses(engine_of(model, num), prompts)}
    return found | {"graphs": responses(engine_of(model, num), prompts)}


def on_the_cpu(num: int):
    """Returns the responses of the embedded model on the CPU."""
    return responses(engine_of(embedded_model("cpu"), num), prompts_of(num))


def num_rows(light: Light) -> int:
    return 12 if light.dry else ROWS


def compared(found: dict, against: str) -> tuple[bool, str, dict]:
    """Compares tokens: whether all have those of one of them, in words and numbers."""
    expected_RG, logprobs_RG = found[against]
    differ, nats = {}, {}
    for name, (tokens_RG, other_RG) in found.items():
        if name != against:
            same_R = (tokens_RG == expected_RG).all(dim=1)
            differ[name] = int((~same_R).sum())
            nats[name] = float((other_RG - logprobs_RG)[same_R].abs().max()) if same_R.any() else None
    words = [f"{name}: {num or 'no'} of {len(expected_RG)} rows differ from {against}" for name, num in differ.items()]
    return not any(differ.values()), "; ".join(words), {"rows_that_differ": differ, "logprobs_differ_nats": nats}


def engine(light: Light) -> Found:
    num, where = num_rows(light), str(light.device)
    found = {"the CPU": on_the_cpu(num)} | by_kernels_and_graphs(embedded_model(where), num)
    ok, told, numbers = compared(found, "the CPU")
    light.row(rows=num, dtype="float32", **numbers)
    return Found(ok, told)


def parity(light: Light) -> Found:
    """Compares the logprobs that generation and training compute of the same tokens in bfloat16: with products summed
    in bfloat16, which is torch's default, and without, as in runs."""
    import torch

    from bench.first_light.speed import DRY, LLAMA_1B, random_model
    from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs
    from rlhf_spmd.runtime.data.prompts import pad
    from rlhf_spmd.runtime.generation import cuda_graphs

    num, means = num_rows(light) // 4, {}
    model = random_model(DRY if light.dry else LLAMA_1B, light.device).eval().requires_grad_(False)
    prompts = [[token % 300 for token in prompt] for prompt in prompts_of(num)]
    for reduced in (True, False):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
        cuda_graphs._KEPT.clear()  # whose products were chosen before
        tokens_RG, logprobs_RG = responses(engine_of(model, num), prompts)
        batch = Sequences.join(pad(prompts).to(light.device), tokens_RG.to(light.device))
        with torch.no_grad():
            trained_RG = response_logprobs(
                model, batch, forward(model, batch), temperature=1.0, eos_ids=(2,), min_new_tokens=0
            )
        means[reduced] = float((trained_RG.cpu() - logprobs_RG).abs()[tokens_RG >= 0].mean())
    light.row(rows=num, dtype="bfloat16", parity_mean_abs=means[False], parity_mean_abs_reduced=means[True])
    told = f"{means[False]:.1e} nats a token on average; {means[True]:.1e} with reduced-precision sums"
    return Found(means[False] <= PARITY_NATS, told)


def preemption(light: Light) -> Found:
    """Tests preemption: the cache has room for the prompts and a part of the responses only, so that rows have to leave
    it."""
    num, where = num_rows(light), str(light.device)
    model, size, prompts = embedded_model(where), 4 if light.dry else 16, prompts_of(num)
    found = {"a full cache": responses(engine_of(model, num, block_size=size), prompts)}
    blocks = num * -(-(32 + LIMIT) // size) // 3
    small = engine_of(model, num, block_size=size, num_blocks=blocks)
    found["a small cache"] = responses(small, prompts)
    ok, told, numbers = compared(found, "a full cache")
    light.row(rows=num, blocks=blocks, num_preempted=small.num_preempted, **numbers)
    return Found(ok and small.num_preempted > 0, f"{small.num_preempted} rows preempted; {told}")


def memory(light: Light) -> Found:
    """Measures the bytes that stay allocated after an engine and its graphs, without the collector's help."""
    import torch

    from rlhf_spmd.runtime.generation import cuda_graphs

    def held() -> int:
        """Returns allocated bytes without the workspaces of matrix products, of which torch keeps one for each stream
        that had any; nor graphs, which use them."""
        cuda_graphs._KEPT.clear()
        if light.dry:
            return 0
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    num, model = num_rows(light), embedded_model(str(light.device))
    responses(engine_of(model, num), prompts_of(num))  # what is made once, kernels for example
    gc.collect()
    gc.disable()
    before = held()
    one = engine_of(model, num)
    cache = weakref.ref(one.cache.keys_LnKsd)
    cache_bytes = 2 * one.cache.keys_LnKsd.nbytes
    responses(one, prompts_of(num))
    del one
    with_workspaces = 0 if light.dry else torch.cuda.memory_allocated()
    after = held()
    lives = cache() is not None
    light.row(
        before_bytes=before,
        after_bytes=after,
        with_workspaces_bytes=with_workspaces,
        cache_bytes=cache_bytes,
        cache_lives=lives,
    )
    told = f"{before / 2**20:.1f} MiB before, {after / 2**20:.1f} after; the cache took {cache_bytes / 2**20:.1f}"
    return Found(not lives and after <= before + 2**20, told + ("; it is still there" if lives else ""))


# ---- whole runs ------------------------------------------------------------------------------------------------------


def ended(name: str, command: Iterable[str], *, limit_s: float = RUN_S, **variables: str) -> tuple[str, str]:
    """Runs a command, and shows what it says -> what it prints and, where it does not end well, why."""
    status, stdout, stderr = run_limited([*command], limit_s=limit_s, environment=dict(os.environ) | variables)
    print(f"--- {name} {variables}\n{stdout}{stderr}", flush=True)
    if status == 0:
        return stdout, ""
    lines = stderr.strip().splitlines()
    told = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "nothing said")
    return stdout, f"{name} {'was stopped' if status is None else f'ended with {status}'}: {told}"


def run(folder: Path, command: Iterable[str], options: Iterable[str], **variables: str) -> tuple[list[dict], str]:
    """Trains as a user would -> the rows of metrics.jsonl and, where it does not end well, why."""
    words = [*command, sys.executable, "-m", "rlhf_spmd", "train", *options]
    if "--resume" not in words:
        words += ["--runs", str(folder.parent), "--name", folder.name]
    _, why = ended(folder.name, words, **variables)
    return rows_at(folder / "metrics.jsonl"), why


def hashes(rows: list[dict]) -> list[str]:
    return [row["tokens_sha256"] for row in rows]


def train(light: Light) -> Found:
    """Trains, while the reference runs on this machine's CPU. What fails does not hide the others' results."""
    wanted = "device=cpu" if light.dry else "device=cuda"
    base = ["--preset", "tiny", "num_samples=0", *(SMALL[1:3] if light.dry else ())]

    def on_device() -> tuple[list[dict], str]:
        folder = light.work / "float32"
        rows, why = run(folder, (), [*base, wanted, "iterations=3"])
        return (rows, why) if why else run(folder, (), ["--resume", str(folder), "iterations=4"])

    with ThreadPoolExecutor() as pool:
        jobs = {
            "float32": pool.submit(on_device),
            "cpu": pool.submit(run, light.work / "cpu", (), [*base, "device=cpu", "iterations=4"]),
            "bfloat16": pool.submit(
                run, light.work / "bfloat16", (), [*base, wanted, "iterations=2", "dtype=bfloat16"]
            ),
        }
        ended = {name: job.result() for name, job in jobs.items()}
    rows, why = ({name: one[i] for name, one in ended.items()} for i in (0, 1))
    same = [one == other for one, other in zip(hashes(rows["float32"]), hashes(rows["cpu"]), strict=False)]
    parity = {name: max((row["parity_max_abs"] for row in rows[name]), default=None) for name in rows}
    mean = max((row["parity_mean_abs"] for row in rows["bfloat16"]), default=math.inf)
    seconds = {name: min((row["iteration_s"] for row in rows[name]), default=None) for name in rows}
    found = {"iterations_with_the_cpus_tokens": sum(same), "parity_nats": parity, "bfloat16_mean_nats": mean}
    light.row(**found, iteration_s=seconds, why=why)
    nats = ", ".join(f"{name} {value:.1e}" for name, value in parity.items() if value is not None)
    told = [
        f"{sum(same)} of 4 iterations draw the CPU's tokens",
        f"parity in nats: {nats}; bfloat16 on average {mean:.1e}",
        *filter(None, why.values()),
    ]
    # After a step the weights differ by rounding, and a token may flip at an edge; before it none may.
    ok = same[:1] == [True] and mean <= PARITY_NATS  # not true of NaN
    return Found(ok and not any(why.values()), "; ".join(told))


def deterministic(light: Light) -> Found:
    """Trains twice with the option and twice without, in bfloat16: only with it the weights must be equal."""
    base = ["--preset", "tiny", *SMALL[1:]]
    base += ["device=cpu", "iterations=1"] if light.dry else ["device=cuda", "iterations=3", "dtype=bfloat16"]
    cases = [(value, number) for value in ("true", "false")[: 1 if light.dry else 2] for number in range(2)]
    folders = {case: light.work / f"deterministic-{case[0]}-{case[1]}" for case in cases}
    with ThreadPoolExecutor(1 if light.dry else len(cases)) as pool:
        jobs = [pool.submit(run, folders[case], (), [*base, f"deterministic={case[0]}"]) for case in cases]
        problems = [why for job in jobs if (why := job.result()[1])]
    of = {case: trained(folder) for case, folder in folders.items()}
    same = {value: of[value, 0] == of[value, 1] != "" for value, _ in cases}
    light.row(equal_weights=same, why=problems)
    told = [f"deterministic={value}: {'equal' if equal else 'other'} weights" for value, equal in same.items()]
    return Found(same["true"] and not problems, "; ".join([*told, *problems]))


def trained(folder: Path) -> str:
    """Returns the SHA-256 of the weights and moments in a run's last checkpoint; empty if there is none."""
    manifests = sorted(folder.glob("checkpoints/iteration-*/manifest.json"))
    text = manifests[-1].read_text(encoding="utf-8") if manifests else "{}"
    return json.loads(text).get("files", {}).get("rank-0000.safetensors", "")


def shared(light: Light) -> Found:
    return strategies_on(light, 4, "device=shared")


def strategies_on(light: Light, ranks: int, wanted: str) -> Found:
    """Compares each strategy with one rank on the CPU; one that fails does not keep the others from running."""
    ranks, wanted = (2, "device=cpu") if light.dry else (ranks, wanted)
    strategies = STRATEGIES[1:2] if light.dry else STRATEGIES
    one_thread = {"OMP_NUM_THREADS": "1"}
    wrong = []
    with ThreadPoolExecutor(1 if light.dry else 2) as pool:  # each run starts as many processes as it has ranks
        alone = pool.submit(run, light.work / f"{light.name}-alone", (), [*SMALL, "device=cpu"], **one_thread)
        jobs = {}
        for name in strategies:
            options, folder = [*SMALL, wanted, "--strategy", name], light.work / f"{light.name}-{name}"
            jobs[name] = pool.submit(run, folder, mpi_command(ranks), options, **one_thread)
        expected, why = alone.result()
        for name, job in jobs.items():
            rows, why_not = job.result()
            same = not why and hashes(rows) == hashes(expected)
            light.row(strategy=name, ranks=ranks, tokens_of_one_rank=same, why=why_not)
            if why_not or not same:
                wrong.append(why_not or f"{name}: other tokens")
    told = f"{len(jobs) - len(wrong)} of {len(jobs)} strategies on {ranks} ranks draw the tokens of one"
    return Found(not wrong, "; ".join(filter(None, [told, *wrong, why])))


# ---- compute-sanitizer -----------------------------------------------------------------------------------------------

STEP = """
import torch
from bench.speed.gpu_decode import DecodeBench
from rlhf_spmd.plan.workload import ModelShape
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
bench = DecodeBench(device, ModelShape(2, 256, 352, 4, 4, 64, 5000), rows=5, context=70, dtype={dtype})
for _ in range(2):
    {call}
if device.type == "cuda":
    torch.cuda.synchronize()
print("done")
"""


def sanitizer(light: Light) -> Found:
    """Runs kernels under the sanitizer: launched one by one with an allocation for each tensor, where memcheck sees
    every access out of bounds, and from a captured graph, whose memory must come from torch's allocator."""
    dtype = "torch.float32" if light.dry else "torch.bfloat16"
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    tool = [] if light.dry else ["compute-sanitizer", *options]
    bare = {} if light.dry else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    cases = {"launched": ("bench.step()", bare), "captured": ("bench.captured()()", {})}

    def checked(name: str) -> bool:
        call, variables = cases[name]
        code = STEP.format(call=call, dtype=dtype)
        stdout, why = ended(name, [*tool, sys.executable, "-c", code], limit_s=140, **variables)
        return not why and "done" in stdout

    with ThreadPoolExecutor() as pool:
        found = dict(zip(cases, pool.map(checked, cases), strict=True))
    light.row(memcheck=found)
    return Found(all(found.values()), ", ".join(f"{name}: {'clean' if ok else 'not'}" for name, ok in found.items()))
