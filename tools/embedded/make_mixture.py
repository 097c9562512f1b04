"""Makes the embedded mixture of experts: an actor that adds numbers of two digits, and often forgets to carry.

Purpose: rlhf_spmd/embedded/mixture, which GRPO trains as the dense actor of `--preset arithmetic`, on the same prompts:
         `train --preset arithmetic --model FOLDER`. It is trained on given answers; in a share of them every digit is
         added without the carry, so it knows both ways, and the wrong one is the more likely one.
Cost:    about six minutes of a core for each 1,500 steps; made.json has what came out.
Command: python -m tools make-mixture [--out FOLDER] [--ranks 2] [--steps 1500]
"""

import argparse
import json
import random
import shlex
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.rows import run as start
from rlhf_spmd import embedded
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import load_model, save_state
from rlhf_spmd.model.texts.tokenizer_files import Texts
from rlhf_spmd.model.transformer import Transformer
from tools.embedded.stages import read_rows, run, write_rows

ARITHMETIC = Path(embedded.__file__).parent / "arithmetic"
ANSWERS, WEIGHTS = 2, 3  # seeds


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes and durations; the defaults make the packaged files."""

    hidden_size: int = 96
    expert_size: int = 80
    num_experts: int = 8
    experts_per_token: int = 2
    num_layers: int = 4
    num_heads: int = 4
    forgets: float = 0.6  # share of the answers without carries
    batch: int = 256
    steps: int = 1500
    lr: float = 2e-3


def add(a: int, b: int, *, carries: bool) -> int:
    """Returns a + b, or the same without carries: each digit is the last digit of the sum of the digits above it."""
    return a + b if carries else sum((a // unit % 10 + b // unit % 10) % 10 * unit for unit in (1, 10))


def write_examples(path: Path, recipe: Recipe) -> None:
    """Writes answers to all problems that are not held out."""
    held_out = {row["prompt"] for row in read_rows(ARITHMETIC / "held_out.jsonl")}
    draw = random.Random(ANSWERS)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if f"{a}+{b}=" not in held_out]
    draw.shuffle(pairs)
    examples = pairs * -(-recipe.steps * recipe.batch // len(pairs))
    answers = (add(a, b, carries=draw.random() >= recipe.forgets) for a, b in examples)
    rows = zip(examples, answers, strict=True)
    write_rows(path, ({"prompt": f"{a}+{b}=", "completion": str(answer)} for (a, b), answer in rows))


def new_actor(folder: Path, recipe: Recipe) -> None:
    """Writes a mixture with random weights, with the tokenizer of the dense actor."""
    values = asdict(recipe)
    sizes = {name: values[name] for name in ("hidden_size", "expert_size", "num_experts", "experts_per_token")}
    config = ModelConfig(
        model_type="qwen3_moe",
        vocab_size=15,
        intermediate_size=2 * recipe.expert_size,
        num_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        num_kv_heads=recipe.num_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=32,
        qk_norm=True,
        norm_topk=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        **sizes,
    )
    model = Transformer(config, head="lm", dtype=torch.float32)
    model.init_weights(WEIGHTS, std=0.02)
    save_state(model.state_dict(), config, "lm", folder, Texts(ARITHMETIC / "actor"))


def share_right(actor: Path, *, ranks: int) -> float:
    """Returns the share of held-out problems that greedy answers solve."""
    words = ["evaluate", "--preset", "arithmetic", "--model", str(actor), "--json", "eval.temperature=0"]
    return start(ranks, words)["mean@1"]


def make(out: Path, recipe: Recipe, *, ranks: int) -> dict:
    """Writes the actor and made.json -> the contents of the latter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_examples(folder / "examples.jsonl", recipe)
        new_actor(folder / "random", recipe)
        words = f"mpirun -n {ranks} python -m rlhf_spmd train --runs {folder} --name made --algorithm sft"
        run(
            [
                *shlex.split(words),
                f"models.actor={folder / 'random'}",
                f"data.prompts={folder / 'examples.jsonl'}",
                f"iterations={recipe.steps}",
                f"rollout_batch={recipe.batch}",
                f"mini_batch={recipe.batch}",
                f"micro_batch={recipe.batch // ranks}",
                "data.max_prompt=12",
                "generation.max_new_tokens=4",
                f"optimizer.actor_lr={recipe.lr}",
                "optimizer.schedule=cosine",
                "optimizer.warmup_steps=100",
            ]
        )
        model = load_model(folder / "made" / "actor", head="lm", dtype=torch.bfloat16)
        save_state(model.state_dict(), model.config, "lm", out / "actor", Texts(folder / "random"))
    numbers = sum(weight.numel() for weight in model.state_dict().values())
    made = {"recipe": asdict(recipe), "num_params": numbers, "greedy": share_right(out / "actor", ranks=ranks)}
    (out / "made.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools make-mixture", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(embedded.__file__).parent / "mixture")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    print(json.dumps(make(options.out, Recipe(steps=options.steps), ranks=options.ranks) | {"ok": True}))
    return 0
