"""The step of `python -m bench first-light` that looks for growth: twenty iterations of generation and a training step,
after the first two of which no kernel may be compiled or loaded, and no memory reserved."""

import gc
import sys
import time

import torch

from bench.first_light.speed import DRY, LLAMA_1B, bits_of, passes_of, random_model
from bench.first_light.steps import Found, Light
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.engines.flat_engine import Groups
from rlhf_spmd.runtime.engines.train_engine import EngineOptions, make_engine
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.requests import Sampling

ITERATIONS, WARM = 20, 2
ROWS, LENGTH = 64, 256  # of the first iteration: responses, and tokens of a prompt or a response at most
GROWTH = 2**26  # bytes that may be reserved after the warm-up: less than the workspace of one stream more


def num_loaded() -> int:
    """Returns the variants of our Triton kernels that this process has compiled or loaded; 0 where they are
    interpreted."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("rlhf_spmd.kernels")]
    kernels = {id(one): one for module in modules for one in vars(module).values() if hasattr(one, "device_caches")}
    return sum(len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values())


def sizes(number: int, rows: int, length: int) -> tuple[int, int]:
    """Returns rows and length of an iteration, from those of the first one, which is the largest."""
    return max(1, rows - 5 * number % rows), max(1, length - 11 * number % length)


def generate(model: Transformer, rows: int, length: int, longest: int, places: int) -> None:
    """Generates responses of some rows in a fresh engine, some of which wait for a place; lengths differ.

    longest: tokens of a sequence in any iteration. As in a run, all engines have the same: it decides in how many parts
        a row's attention is split, and each number of parts is a kernel.
    """
    engine = Engine(model.eval(), longest=longest, max_sequences=places)
    prompts = [[1 + (7 * i + j) % 250 for j in range(1 + (5 * i) % length)] for i in range(rows)]
    engine.submit(prompts, bits_of(rows, length), [Sampling(1 + (3 * i) % length) for i in range(rows)])
    engine.run()


def steady(light: Light) -> Found:
    """Checks that memory stays steady: the first iteration is the largest; every later one has sizes of its own."""
    most, longest, num = (4, 4, 3) if light.dry else (ROWS, LENGTH, ITERATIONS)
    model = random_model(DRY if light.dry else LLAMA_1B, light.device)
    engine = make_engine(model, groups=Groups(), options=EngineOptions(0, torch.bfloat16))
    loaded, reserved, seconds = [], [], []
    for number in range(num):
        started = time.perf_counter()
        rows, length = sizes(number, most, longest)
        generate(model, rows, length, 2 * longest, max(1, most // 2))
        passes_of(model.train(), engine, max(1, rows // 8), length, length)()
        engine.update(lr=1e-6)
        gc.collect()
        loaded.append(num_loaded())
        reserved.append(0 if light.dry else torch.cuda.memory_reserved(light.device))
        seconds.append(time.perf_counter() - started)
    late, grown = loaded[-1] - loaded[WARM - 1], max(reserved[WARM:]) - max(reserved[:WARM])
    light.row(iterations=num, kernels_loaded=loaded, reserved_bytes=reserved, seconds=seconds)
    told = f"{late} variants of kernels loaded after the warm-up, {grown / 2**20:+,.0f} MiB reserved"
    return Found(late == 0 and grown <= GROWTH, told)
