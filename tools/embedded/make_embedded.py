"""Makes the embedded default: tokenizer, models, prompts and data files, all from the text of `grammar.py`.

Purpose: the files in `rlhf_spmd/embedded/tiny/`, which `--preset tiny` trains. Every model is trained by a run of this
         program: the base model, which writes poorly, by `sft` on damaged scenes; the actor by `sft` on scenes; the
         reward model by `reward_model` on pairs of continuations, ranked by the grammar.
Cost:    9 minutes on two CPU cores that others used, too, 1 GB of memory; made.json records time and quality.
Command: python -m tools make-embedded [--out FOLDER] [--ranks 2] [--keep]
         --keep: tokenizer, actor, reward model and prompts stay, and only what is made from them is made
"""

# B sequences, T tokens, V vocabulary

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rlhf_spmd import embedded
from rlhf_spmd.model.hf import load_model, load_tokenizer, save_state
from rlhf_spmd.model.texts.tokenizer_files import Texts
from rlhf_spmd.model.transformer import ModelConfig, Transformer
from tools.embedded import grammar, pairs
from tools.embedded.responses import continuations
from tools.embedded.scoring import accuracy, encode, pad_rows, score_rows, standardise
from tools.embedded.stages import adamw, sizes, tail, trained, write_rows

PAD, BOS, EOS = "<|pad|>", "<|begin|>", "<|end|>"
SEEDS = {"tokenizer": 1, "supervised": 2, "pairs": 3, "held_out": 4, "prompts": 5, "weights": 6, "centre": 7}
SEEDS |= {"base": 8, "answers": 9, "held_out_prompts": 10, "sample_pairs": 11}
KEPT = "tokenizer, actor, reward and prompts are of an earlier make, whose recipe, seeds and versions stand here"
LONGEST = ("data.max_prompt=32", "generation.max_new_tokens=96")  # of a row of these runs


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes and durations; the defaults make the packaged files."""

    corpus: int = 20_000  # scenes for training the tokenizer
    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 352
    actor_layers: int = 4
    reward_layers: int = 2  # starts from the first two layers of the actor
    num_heads: int = 4
    num_kv_heads: int = 2
    base_steps: int = 300
    base_damage: int = 3  # how often a scene is damaged
    sft_steps: int = 2000
    sft_batch: int = 64
    sft_lr: float = 3e-3
    reward_steps: int = 1500
    reward_batch: int = 64  # pairs
    reward_lr: float = 1e-3
    annotator: float = pairs.ANNOTATOR
    foresight: float = 0.125  # of each response, so a quarter of the mean squared error
    num_prompts: int = 512
    num_held_out: int = 128  # prompts, answers and pairs
    num_answers: int = 1024
    num_pairs: int = 1024
    max_new_tokens: int = 24
    pool: int = 2048  # openings for which the actor's own continuations are ranked


# -- text ----


def train_tokenizer(folder: Path, recipe: Recipe) -> None:
    """Writes a byte-level BPE trained on scenes: tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    rng = random.Random(SEEDS["tokenizer"])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(("".join(grammar.scene(rng)) for _ in range(recipe.corpus)), trainer)
    special = [(BOS, tokenizer.token_to_id(BOS))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def next_token_loss(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats per token, without padding."""
    logits_BTV = model.logits(model(tokens_BT[:, :-1]))
    return cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten(), ignore_index=-1)


@torch.no_grad()
def held_out_loss(folder: Path, tokenizer, num: int = 512) -> float:
    """Measures the nats per token of a model on fresh scenes."""
    rng = random.Random(SEEDS["held_out"])
    tokens_BT = pad_rows([encode(tokenizer, *grammar.scene(rng)) for _ in range(num)])
    return next_token_loss(load_model(str(folder), head="lm"), tokens_BT).item()


# -- everything ----


def round_weights(model: Transformer) -> None:
    """Rounds to bfloat16, as in the saved files, so that the shipped models are measured."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def new_model(recipe: Recipe, tokenizer, head: str) -> Transformer:
    """Returns a freshly initialised model of the recipe's shape."""
    config = ModelConfig(
        model_type="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_layers=recipe.actor_layers if head == "lm" else recipe.reward_layers,
        num_heads=recipe.num_heads,
        num_kv_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=256,
        tie_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )
    return Transformer(config, head=head, seed=SEEDS["weights"])


def save(model: Transformer, head: str, folder: Path, tokenizer) -> Path:
    """Writes a model with its tokenizer."""
    save_state(model.state_dict(), model.config, head, folder, Texts(tokenizer.folder))
    return folder


def shipped(trained_folder: Path, head: str, folder: Path, tokenizer) -> None:
    """Writes a trained model in bfloat16."""
    save(load_model(str(trained_folder), head=head, dtype=torch.bfloat16), head, folder, tokenizer)


def scenes(seed: int, num: int, damage: int = 0) -> Iterator[dict]:
    """Yields rows of a text each.

    damage: how often each is damaged.
    """
    rng = random.Random(seed)
    for _ in range(num):
        text = "".join(grammar.scene(rng))
        for _ in range(damage):
            text = pairs.damaged(rng, text).lstrip()
        yield {"text": text}


def make_writer(name: str, work: Path, out: Path, tokenizer, recipe: Recipe, *, steps: int, seed: str, damage: int,
                ranks: int) -> dict:  # fmt: skip
    """Trains a model with random weights on scenes -> its measures."""
    random_model = new_model(recipe, tokenizer, "lm")
    start = save(random_model, "lm", work / f"random-{name}", tokenizer)
    data = write_rows(work / f"{name}.jsonl", scenes(SEEDS[seed], steps * recipe.sft_batch, damage))
    words = [*adamw("actor", recipe.sft_lr, max(1, steps // 20)), *sizes(steps, recipe.sft_batch, ranks), *LONGEST]
    folder = trained("sft", start, data, work / f"run-{name}", *words, ranks=ranks)
    shipped(folder, "lm", out / name, tokenizer)
    return {
        "parameters": sum(weight.numel() for weight in random_model.parameters()),
        "supervised_loss": tail(work / f"run-{name}", "loss"),
        "supervised_loss_held_out": held_out_loss(out / name, tokenizer),
    }


def make_reward(work: Path, out: Path, tokenizer, recipe: Recipe, *, ranks: int) -> dict:
    """Trains the reward model on pairs, from the first layers of the actor -> its measures."""
    actor, start = load_model(str(out / "actor"), head="lm"), new_model(recipe, tokenizer, "scalar")
    first = Transformer(start.config, head="lm", seed=0)
    first.load_state_dict({name: weight for name, weight in actor.state_dict().items() if name in first.state_dict()})
    rng = random.Random(SEEDS["pairs"])
    starts = [grammar.opening(rng) for _ in range(recipe.pool)]
    texts = [start.text for start in starts]
    samples = [
        continuations(actor, tokenizer, texts, SEEDS["pairs"] + k, max_new_tokens=recipe.max_new_tokens)
        for k in (100, 101)
    ]
    rows = pairs.mixed_pairs(rng, starts, samples, recipe.reward_steps * recipe.reward_batch)
    data = write_rows(work / "pairs.jsonl", rows)
    words = [*adamw("reward", recipe.reward_lr, max(1, recipe.reward_steps // 20)), *LONGEST]
    words += [
        *sizes(recipe.reward_steps, recipe.reward_batch, ranks),
        f"reward_model.foresight_coef={recipe.foresight}",
    ]
    folder = trained(
        "reward_model",
        save(first, "lm", work / "first-layers", tokenizer),
        data,
        work / "run-reward",
        *words,
        ranks=ranks,
    )
    shipped(folder, "scalar", out / "reward", tokenizer)
    return {
        "reward_loss": tail(work / "run-reward", "loss"),
        "reward_pairs_right": tail(work / "run-reward", "accuracy"),
    }


def centre_reward(out: Path, tokenizer, recipe: Recipe) -> dict:
    """Standardises the reward model on the actor's responses to the prompts -> measures of both."""
    actor, reward = load_model(str(out / "actor"), head="lm"), load_model(str(out / "reward"), head="scalar")
    prompts = prompts_of(out / "prompts.jsonl")
    samples = continuations(actor, tokenizer, prompts, SEEDS["centre"], max_new_tokens=recipe.max_new_tokens)
    ended = [encode(tokenizer, start, text) for start, (text, end) in zip(prompts, samples, strict=True) if end]
    standardise(reward, pad_rows(ended))
    round_weights(reward)
    save(reward.bfloat16(), "scalar", out / "reward", tokenizer)
    return measures(out, tokenizer, recipe)


@torch.no_grad()
def measures(out: Path, tokenizer, recipe: Recipe) -> dict:
    """Measures the actor and the reward model in a folder."""
    actor, reward = load_model(str(out / "actor"), head="lm"), load_model(str(out / "reward"), head="scalar")
    prompts = prompts_of(out / "prompts.jsonl")
    samples = continuations(actor, tokenizer, prompts, SEEDS["centre"], max_new_tokens=recipe.max_new_tokens)
    ended = [encode(tokenizer, start, text) for start, (text, end) in zip(prompts, samples, strict=True) if end]
    scores_B = score_rows(reward, pad_rows(ended))
    return {
        "reward_accuracy_held_out": accuracy(reward, tokenizer, random.Random(SEEDS["held_out"])),
        "reward_mean_of_actor": scores_B.mean().item(),
        "reward_std_of_actor": scores_B.std().item(),
        "ended_share_of_actor": len(ended) / len(prompts),
        "grammar_score_of_actor": sum(grammar.score(text) for text, _ in samples) / len(samples),
    }


def prompts_of(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def write_prompts(out: Path, recipe: Recipe) -> None:
    """Writes prompts.jsonl: distinct openings in random order."""
    rng = random.Random(SEEDS["prompts"])
    prompts = sorted({grammar.opening(rng).text for _ in range(recipe.num_prompts)})
    rng.shuffle(prompts)
    write_rows(out / "prompts.jsonl", ({"prompt": text} for text in prompts))


def write_held_out_prompts(out: Path, recipe: Recipe) -> list[str]:
    """Writes held_out.jsonl: openings that are not among the prompts."""
    rng, known, found = random.Random(SEEDS["held_out_prompts"]), set(prompts_of(out / "prompts.jsonl")), []
    while len(found) < recipe.num_held_out:
        if (text := grammar.opening(rng).text) not in known:
            known.add(text)
            found.append(text)
    write_rows(out / "held_out.jsonl", ({"prompt": text} for text in found))
    return found


def write_answers(out: Path, tokenizer, recipe: Recipe) -> None:
    """Writes answers.jsonl and answers_held_out.jsonl: scenes as prompt and completion, each with an opening of its
    own."""
    rng, rows = random.Random(SEEDS["answers"]), {}
    while len(rows) < recipe.num_answers + recipe.num_held_out:
        start, text = grammar.scene(rng)
        length = len(encode(tokenizer, start, text)) - len(tokenizer.encode(start))
        if length <= recipe.max_new_tokens and start not in rows:
            rows[start] = {"prompt": start, "completion": text}
    found = list(rows.values())
    write_rows(out / "answers.jsonl", found[: recipe.num_answers])
    write_rows(out / "answers_held_out.jsonl", found[recipe.num_answers :])


def write_pairs(out: Path, tokenizer, held_out: list[str], recipe: Recipe) -> None:
    """Writes pairs.jsonl and pairs_held_out.jsonl: two of the actor's responses to a prompt, ranked."""
    actor = load_model(str(out / "actor"), head="lm")
    for name, prompts, num in (
        ("pairs", prompts_of(out / "prompts.jsonl"), recipe.num_pairs),
        ("pairs_held_out", held_out, recipe.num_held_out),
    ):
        rows = []
        for sample in range(2 * -(-3 * num // (2 * len(prompts)))):  # half as many more, since ties are left out
            seed = 1000 * SEEDS["sample_pairs"] + sample
            made = continuations(actor, tokenizer, prompts, seed, max_new_tokens=recipe.max_new_tokens)
            for prompt, (text, ended) in zip(prompts, made, strict=True):
                rows.append({"prompt": prompt, "response": text, "finish": "eos" if ended else "length"})
        write_rows(out / f"{name}.jsonl", pairs.pairs_of_samples(rows, SEEDS["sample_pairs"])[:num])


def make(out: Path, recipe: Recipe, *, ranks: int, keep: bool = False) -> dict:
    """Makes everything in `out`; returns the contents of made.json.

    keep: keeps tokenizer, actor, reward model and prompts, which are there.
    """
    started = time.monotonic()
    made = json.loads((out / "made.json").read_text(encoding="utf-8")) if keep else {}
    if not keep:
        train_tokenizer(out / "actor", recipe)
        write_prompts(out, recipe)
    tokenizer = load_tokenizer(out / "actor")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if not keep:
            made |= make_writer(
                "actor", work, out, tokenizer, recipe, steps=recipe.sft_steps, seed="supervised", damage=0, ranks=ranks
            )
            made |= make_reward(work, out, tokenizer, recipe, ranks=ranks)
            made |= centre_reward(out, tokenizer, recipe)
        base = make_writer(
            "base",
            work,
            out,
            tokenizer,
            recipe,
            steps=recipe.base_steps,
            seed="base",
            damage=recipe.base_damage,
            ranks=ranks,
        )
    write_answers(out, tokenizer, recipe)
    write_pairs(out, tokenizer, write_held_out_prompts(out, recipe), recipe)
    made = {key: round(value, 4) if isinstance(value, float) else value for key, value in made.items()}
    made["base"] = {key: round(value, 4) for key, value in base.items()}
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "tokenizers": version("tokenizers")}
    seconds = round(time.monotonic() - started)
    about = {"recipe": asdict(recipe), "seeds": SEEDS, "versions": versions, "seconds": seconds}
    made |= {"kept": KEPT, "base_and_data": about} if keep else about
    (out / "made.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(embedded.__file__).parent / "tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep tokenizer, actor, reward model and prompts")
    options = parser.parse_args(arguments)
    made = make(options.out, Recipe(), ranks=options.ranks, keep=options.keep)
    print("made", options.out)
    print(json.dumps(made))
    return 0
