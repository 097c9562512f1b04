"""The steps of `python -m bench first-light` that ask how fast it is. What they promise is a share of what the same
process measures of the device, or a ratio to a peer in the same process; a dry run judges none of it."""

# R requests, P prompt tokens, G response tokens, B sequences

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.first_light.steps import Found, Light, Missing
from bench.forecast import derived
from bench.forecast.derived import GPU, GPUS, LLAMA_7B, Derived
from bench.speed.gpu_decode import captured
from bench.speed.kernels import ROUNDS, gpu_cases, measure, measure_step, peak_bytes
from bench.speed.roofline import alternate, ceilings_of, elapsed_s, precision_of
from bench.tables import text_table
from rlhf_spmd.config.model_folders import model_config_of
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.cost.seconds import head_flops, layer_flops
from rlhf_spmd.plan.workload import ModelShape

ACTIVATIONS_OFF = 0.10  # of what plan/cost/memory.py says of a training step
SAMPLE_SHARE = 0.60  # of the memory bandwidth
MATRIX_SHARE = 0.40  # of the rate of bfloat16 products: a step of training
DRY_CEILINGS = {"memory_bytes_per_s": 1e10, "matrix_flops_per_s": {"float32": 1e11, "bfloat16": 1e11}}
DRY = ModelShape(2, 32, 48, 4, 2, 8, 300)
LLAMA_1B = ModelShape(22, 2048, 5632, 32, 4, 64, 32000)
LONGEST = 2048  # tokens of a sequence


def measured_ceilings(device: torch.device, *dtypes: torch.dtype) -> dict:
    """Returns the ceilings of memory and of matrix products in these precisions; invented in a dry run."""
    return DRY_CEILINGS if device.type == "cpu" else ceilings_of(device, *dtypes)


@torch.no_grad()
def random_model(shape: ModelShape, device: torch.device) -> Transformer:
    """Returns a language model with random weights in bfloat16, created on its device."""
    config = model_config_of(shape, shape.num_layers, LONGEST)
    model = Transformer(config, head="lm", dtype=torch.bfloat16, device="meta").to_empty(device=device)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 0.02)
    return model


def beside(light: Light, work: Callable[[GPU], Derived]) -> tuple[dict, str]:
    """Returns what some work should take on this type of device, for a row and in words; nothing where it has no data
    sheet."""
    from rlhf_spmd.plan.cluster import device_type_of

    facts = light.facts
    kind = derived.DEVICE if light.dry else device_type_of(facts["device"], facts["total_bytes"])
    if kind not in GPUS:
        return {}, ""
    found = work(GPUS[kind])
    row = {"derived_s": found.seconds, "roofline_s": found.roofline_s, "derived_terms": dict(found.terms)}
    return row, f" (derived {1e3 * found.seconds:.3g} ms, roofline {1e3 * found.roofline_s:.3g})"


# ---- decoding --------------------------------------------------------------------------------------------------------


def kernel_step(light: Light) -> Found:
    """Measures the kernels in one graph, without an engine."""
    shape, rows, context = (ModelShape(2, 32, 48, 2, 2, 16, 300), 2, 32) if light.dry else (LLAMA_7B, 64, 1024)
    ceilings = measured_ceilings(light.device)
    row = light.row(**measure_step(light.device, ceilings, shape=shape, rows=rows, context=context))
    print(text_table("kernels", [row]))
    told = f"{1e3 * row['ours_s']:.2f} ms, {row['share_of_memory']:.0%} of {gigabytes(ceilings)} GB/s"
    return Found(light.dry or row["ok"], told)


def gigabytes(ceilings: Mapping) -> str:
    return f"{ceilings['memory_bytes_per_s'] / 1e9:,.0f}"


def sampling(light: Light) -> Found:
    """Measures sampling by a graph's replay, which is the kernels alone; launched one by one for comparison."""
    from bench.speed import kernel_cases as cases

    device, told, ok = light.device, [], True
    rows, vocab = (4, 3000) if light.dry else (256, 131072)
    ceilings = measured_ceilings(device)
    for dtype in (torch.bfloat16, torch.float32):
        case = cases.sampling(device, rows, vocab, dtype, "plain")
        ours = case.calls["ours"]
        seconds = alternate({"graph": captured(ours, device), "launched": ours}, device, rounds=ROUNDS)
        shares = {name: case.num_bytes / s / ceilings["memory_bytes_per_s"] for name, s in seconds.items()}
        name = precision_of(dtype)
        should, words = beside(light, lambda gpu, size=dtype.itemsize: derived.sample(gpu, rows, vocab, size))
        about = {"kernel": "sample", "shape": case.shape, "dtype": name} | should | ceilings
        light.row(**about, seconds=seconds, share_of_memory=shares)
        told.append(f"{name} {1e6 * seconds['graph']:.0f} us{words}, {shares['graph']:.0%} of memory")
        ok &= shares["graph"] >= SAMPLE_SHARE
    return Found(light.dry or ok, "; ".join(told))


def kernel_speed(light: Light) -> Found:
    from bench.speed import kernel_cases as cases

    device, below, num = light.device, [], 0
    ceilings = measured_ceilings(device, torch.float32, torch.bfloat16)
    suite = [cases.gating(device, 4, 64, torch.float32)] if light.dry else gpu_cases(device)
    for case in suite:
        row = light.row(**measure(case, device, ceilings))
        print(text_table("kernels", [row]), flush=True)
        num += 1
        below += [] if row["ok"] or light.dry else [f"{row['kernel']} {row['dtype']} {row['shape']}"]
    return Found(not below, f"{num - len(below)} of {num} cases" + "".join(f"; below: {name}" for name in below))


# ---- training, and a calibration -------------------------------------------------------------------------------------


def train_step(light: Light) -> Found:
    """Measures a step with sequences of one length, without recomputation; AdamW with float32 masters."""
    from rlhf_spmd.runtime.engines.adamw import EngineOptions
    from rlhf_spmd.runtime.engines.flat_engine import Groups
    from rlhf_spmd.runtime.engines.train_engine import make_engine

    num, prompt, response = (2, 3, 4) if light.dry else (8, 128, 896)
    shape, device = DRY if light.dry else LLAMA_1B, light.device
    ceilings = measured_ceilings(device, torch.bfloat16)
    model = random_model(shape, device)
    engine = make_engine(model.train(), groups=Groups(), options=EngineOptions(0, torch.bfloat16))
    passes = passes_of(model, engine, num, prompt, response)

    def step() -> None:
        passes()
        engine.update(lr=1e-6)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()
    forecast_bytes = forecast_activation_bytes(shape, num, prompt, response)
    activations = forecast_bytes if light.dry else peak_bytes(passes, device)
    step_s = statistics.median(elapsed_s(step) for _ in range(2 if light.dry else 7))
    flops = training_flops(shape, num, prompt, response)
    share = flops / step_s / ceilings["matrix_flops_per_s"]["bfloat16"]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    should, words = beside(light, lambda gpu: derived.train(gpu, shape, num, prompt, response, update=True))
    light.row(
        work=f"an optimizer step, {num} sequences of {prompt + response} tokens",
        model="Llama 1.1B shape",
        dtype="bfloat16",
        step_s=step_s,
        flops=flops,
        share_of_matrix=share,
        tokens_per_s=num * (prompt + response) / step_s,
        peak_bytes=peak,
        activation_bytes=activations,
        forecast_activation_bytes=forecast_bytes,
        **ceilings,
        **should,
    )
    rate, off = ceilings["matrix_flops_per_s"]["bfloat16"] / 1e12, activations / forecast_bytes - 1
    told = f"{1e3 * step_s:.0f} ms{words}, {share:.0%} of {rate:.0f} TFLOP/s, activations {off:+.0%} of the forecast"
    return Found(light.dry or (share >= MATRIX_SHARE and abs(off) <= ACTIVATIONS_OFF), told)


def passes_of(model: Transformer, engine: Any, num: int, prompt: int, response: int) -> Callable[[], None]:
    """Returns the passes of an optimizer step on random sequences of one length."""
    from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs

    sizes = (num, prompt + response)
    tokens_BT = torch.randint(model.config.vocab_size, sizes, generator=torch.Generator().manual_seed(0))
    batch = Sequences.join(*tokens_BT.to(next(model.parameters()).device).split((prompt, response), 1))

    def loss(model: Transformer) -> Tensor:
        output = forward(model, batch)
        return -response_logprobs(model, batch, output, temperature=1.0, eos_ids=(), min_new_tokens=0).mean()

    def passes() -> None:
        engine.begin()
        engine.backward(engine.forward(loss), last=True)

    return passes


def forecast_activation_bytes(shape: ModelShape, num: int, prompt: int, response: int) -> int:
    """Returns what plan/cost/memory.py says of such a micro-batch on one rank, in bfloat16."""
    from rlhf_spmd.config.options import make_workload
    from rlhf_spmd.config.presets import load
    from rlhf_spmd.plan.cost.memory import activation_bytes
    from rlhf_spmd.plan.layout import Layout

    workload = make_workload(load("llama-7b", algorithm="sft"))
    sizes = {"micro_batch": num, "max_prompt": prompt, "max_response": response, "param_bytes": 2}
    workload = replace(workload, models=dict.fromkeys(workload.models, shape), **sizes)
    (call,) = workload.workflow.train_calls
    return activation_bytes(workload, call, Layout((0,), dp=1), 0)


def training_flops(shape: ModelShape, num: int, prompt: int, response: int) -> float:
    """Returns the operations of a forward and a backward pass: three times those of the weights, the head at the
    response tokens only, and of causal attention, in which half of the square counts."""
    total = prompt + response
    layers = shape.num_layers * layer_flops(shape, total, total / 2)
    return 3.0 * num * (layers + head_flops(shape, response))


def calibrate(light: Light) -> Found:
    """Profiles as the subcommand does, with fewer repetitions: the shape of LLaMA 7B on a GPU."""
    from rlhf_spmd.config import presets
    from rlhf_spmd.machines.calibration_file import read_calibration, write_calibration
    from rlhf_spmd.plan.cluster import DEVICE_BYTES, device_type_of
    from rlhf_spmd.runtime.profile.profile import Grid, profile, summary
    from rlhf_spmd.runtime.world.world import World

    facts = light.facts
    kind = None if light.dry else device_type_of(facts["device"], facts["total_bytes"])
    if light.dry:
        config = presets.load("tiny", ["device=cpu"])
        grid = Grid(max_prompt=4, max_response=2, shares=(1.0,), most_rows=2, most_places=2, tps=(1,))
    elif kind not in DEVICE_BYTES:
        raise Missing(f"a device type for {facts['device']} in plan/cluster.py")
    else:
        config = presets.load("llama-7b", ["device=cuda", f"device_type={kind}"])
        grid = Grid(max_prompt=256, max_response=64, shares=(0.5, 1.0), most_rows=8, most_places=64, tps=(1,))
    world = World.discover()
    world.use_device(config.device)
    path = light.out / "calibration.json"
    found = profile(world, config, name=path.stem, grid=grid, budget_s=0.001 if light.dry else 0.05)
    write_calibration(found, str(path))
    print(summary(found))
    [(device_type, one)] = read_calibration(str(path)).devices.items()
    light.row(
        device_type=device_type,
        matrix_flops=one.matrix_flops,
        memory_bytes_per_s=one.memory_bytes_per_s,
        host_bytes_per_s=one.host_bytes_per_s,
        tables=len(one.measured),
    )
    world.shutdown()
    world.finalize()
    rates = f"{one.matrix_flops / 1e12:.3g} TFLOP/s, {one.memory_bytes_per_s / 1e9:,.0f} GB/s"
    return Found(one.matrix_flops > 0 and len(one.measured) > 0, f"{device_type}: {rates}")
