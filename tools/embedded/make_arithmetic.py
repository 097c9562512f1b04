"""Makes the embedded arithmetic task: sums of numbers of two digits, and an actor that often forgets to carry.

Purpose: the files in `rlhf_spmd/embedded/arithmetic/`, which `--preset arithmetic` trains with GRPO. The actor is
         trained by this program on given responses (`--algorithm sft`). In a share of them every
         digit is added without the carry, as pupils do, so the actor knows both ways, and the wrong one is the more
         likely one.
Cost:    about 10 minutes on two CPU cores, 1 GB of memory; made.json records time and quality.
Command: python -m tools make-arithmetic [--out FOLDER] [--ranks 2]
"""

# B sequences, P prompt tokens, G response tokens

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from rlhf_spmd import embedded
from rlhf_spmd.config.evaluation_metrics import measure
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import load_model, load_tokenizer, save_state
from rlhf_spmd.model.texts.tokenizer_files import Texts
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.rollout import generate_rows
from tools.embedded.stages import metrics, sizes, trained, write_rows

PAD, BOS, EOS = "<|pad|>", "<|begin|>", "<|end|>"
CHARACTERS = "0123456789+="
SEEDS = {"problems": 1, "mistakes": 2, "weights": 3}
NUM_SHOWN = 3  # first prompts, whose responses a run prints; they need a carry
MOST_TOKENS = 4  # of an answer: three digits and the end


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes and durations; the defaults make the packaged files."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 5
    num_heads: int = 4
    num_held_out: int = 200  # problems that are in no training data; a + b may be held out while b + a is not
    num_prompts: int = 2048  # of the others, for GRPO
    forgets: float = 0.6  # share of the answers without carries
    batch: int = 256
    steps: int = 1500
    lr: float = 2e-3


def add(a: int, b: int, *, carries: bool = True) -> int:
    """Returns a + b, or the same without carries: each digit is the last digit of the sum of the digits above it."""
    if carries:
        return a + b
    return sum((a // unit % 10 + b // unit % 10) % 10 * unit for unit in (1, 10))


def problems() -> list[tuple[int, int]]:
    """Returns all problems in random order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(SEEDS["problems"]).shuffle(pairs)
    return pairs


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, with one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate((PAD, BOS, EOS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_problems(path: Path, some: list[tuple[int, int]], answer_of, column: str = "answer") -> None:
    write_rows(path, ({"prompt": f"{a}+{b}=", column: str(answer_of(a, b))} for a, b in some))


def new_actor(folder: Path, recipe: Recipe) -> Transformer:
    """Makes a model with random weights, with its tokenizer, in a folder."""
    config = ModelConfig(
        model_type="llama",
        vocab_size=3 + len(CHARACTERS),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        num_kv_heads=recipe.num_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    model = Transformer(config, head="lm", dtype=torch.float32)
    model.init_weights(SEEDS["weights"], std=0.02)
    write_tokenizer(folder)
    save_state(model.state_dict(), config, "lm", folder, Texts(folder))
    return model


def train(model: Path, data: Path, run_folder: Path, recipe: Recipe, ranks: int) -> Path:
    """Trains a model on given responses by a run of this program -> the folder of the trained model."""
    words = [f"optimizer.actor_lr={recipe.lr}", "optimizer.schedule=cosine", "optimizer.warmup_steps=100"]
    words += [
        *sizes(recipe.steps, recipe.batch, ranks),
        "data.max_prompt=12",
        f"generation.max_new_tokens={MOST_TOKENS}",
    ]
    return trained("sft", model, data, run_folder, *words, ranks=ranks)


def accuracy(actor: Path, held_out: Path, *, samples: int, temperature: float) -> dict[str, float]:
    """Measures mean@n and pass@k of an actor on problems."""
    tokenizer, rows = (
        load_tokenizer(str(actor)),
        [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()],
    )
    model = load_model(str(actor), head="lm", dtype=torch.float32)
    prompts_BP = pad([tokenizer.encode(row["prompt"]) for row in rows for _ in range(samples)])
    places = np.arange(len(rows)).repeat(samples), np.tile(np.arange(samples), len(rows))
    bits_BG = torch.from_numpy(random_bits(0, random_streams.OFFLINE, 0, *places, MOST_TOKENS))
    with torch.no_grad():
        made = generate_rows(model, prompts_BP, bits_BG, temperature=temperature, eos_ids=(tokenizer.eos_token_id,))
    texts = [tokenizer.decode([token for token in row if token >= 0]) for row in made[0].tolist()]
    right = [float(text.strip() == rows[index // samples]["answer"]) for index, text in enumerate(texts)]
    return measure([right[i : i + samples] for i in range(0, len(right), samples)], 1.0)


def make(out: Path, recipe: Recipe, *, ranks: int) -> dict:
    """Writes actor, prompts, held-out problems and made.json -> the contents of the last."""
    began = time.perf_counter()
    held_out, rest = problems()[: recipe.num_held_out], problems()[recipe.num_held_out :]
    draw = random.Random(SEEDS["mistakes"])
    out.mkdir(parents=True, exist_ok=True)
    write_problems(out / "held_out.jsonl", held_out, add)
    prompts = rest[: recipe.num_prompts]
    shown = [pair for pair in prompts if add(*pair) != add(*pair, carries=False)][:NUM_SHOWN]
    write_problems(out / "prompts.jsonl", shown + [pair for pair in prompts if pair not in shown], add)
    with tempfile.TemporaryDirectory() as folder:
        runs, data = Path(folder), Path(folder) / "examples.jsonl"
        examples = rest * -(-recipe.steps * recipe.batch // len(rest))
        write_problems(data, examples, lambda a, b: add(a, b, carries=draw.random() >= recipe.forgets), "completion")
        new_actor(runs / "random", recipe)
        made_by = runs / "supervised"
        model = load_model(str(train(runs / "random", data, made_by, recipe, ranks)), head="lm", dtype=torch.bfloat16)
        save_state(model.state_dict(), model.config, "lm", out / "actor", Texts(runs / "random"))
        losses = [row["loss"] for row in metrics(made_by)]
    made = {
        "recipe": asdict(recipe),
        "num_params": sum(weight.numel() for weight in model.state_dict().values()),
        "loss": losses[-1],
        "greedy": accuracy(out / "actor", out / "held_out.jsonl", samples=1, temperature=0.0)["mean@1"],
        "sampled": accuracy(out / "actor", out / "held_out.jsonl", samples=8, temperature=1.0),
        "torch": version("torch"),
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }
    (out / "made.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(embedded.__file__).parent / "arithmetic")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    options = parser.parse_args(arguments)
    made = make(options.out, Recipe(steps=options.steps), ranks=options.ranks)
    print(f"made {options.out}: greedy {made['greedy']:.1%}, pass@8 {made['sampled']['pass@8']:.1%}")
    print(json.dumps(made))
    return 0
