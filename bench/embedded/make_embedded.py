"""Makes the embedded default: tokenizer, actor, reward model and prompts, all from the text of `grammar.py`.

Purpose: the files in `rlhf_spmd/embedded/tiny/`, which `--preset tiny` trains with PPO. Supervised training on scenes,
         then reward-model training on preference pairs (two continuations of one opening, ranked by the grammar).
Cost:    about 5 minutes on two CPU cores, 1 GB of memory; made.json records time and quality.
Command: python -m bench make-embedded [--out FOLDER] [--threads 2]
"""

# B sequences, P prompt tokens, G response tokens, T tokens, V vocabulary, D hidden

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from bench.embedded import grammar
from rlhf_spmd import embedded
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.hf import load_tokenizer, save_state
from rlhf_spmd.model.transformer import ModelConfig, Transformer
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.rollout import generate_rows

PAD, BOS, EOS = "<|pad|>", "<|begin|>", "<|end|>"
SEEDS = {"tokenizer": 1, "supervised": 2, "pairs": 3, "held_out": 4, "prompts": 5, "weights": 6, "centre": 7}


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
    sft_steps: int = 1500
    sft_batch: int = 64
    sft_lr: float = 3e-3
    reward_steps: int = 1000
    reward_batch: int = 64  # pairs
    reward_lr: float = 1e-3
    annotator: float = 6.0  # P(a preferred to b) = sigmoid(annotator * (quality(a) - quality(b)))
    foresight: float = 0.25
    num_prompts: int = 512
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
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode(tokenizer, start: str, end: str) -> list[int]:
    """Token ids of opening + continuation, with the begin and end tokens."""
    return tokenizer.encode(start + end) + [tokenizer.eos_token_id]


def pad_rows(rows: list[list[int]]) -> Tensor:
    """Rows of unequal length as [B, T], padded on the right with -1."""
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


# -- supervised training ----


def schedule(step: int, steps: int) -> float:
    """The share of the peak learning rate: 5 % linear warm-up, then a cosine to 2 %."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def optimise(model: Transformer, steps: int, lr: float, loss_of_step, name: str) -> float:
    """AdamW over `loss_of_step(step)`; returns the mean loss of the last 5 % of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps)
        loss = loss_of_step(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"{name} step {step:5d}  loss {losses[-1]:.4f}", flush=True)
    tail = losses[-max(1, steps // 20) :]
    return sum(tail) / len(tail)


def next_token_loss(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token, without padding."""
    logits_BTV = model.logits(model(tokens_BT[:, :-1]))
    return cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten(), ignore_index=-1)


def supervise(model: Transformer, tokenizer, recipe: Recipe) -> dict[str, float]:
    """Trains the actor on fresh scenes at every step; returns training and held-out loss."""
    rng = random.Random(SEEDS["supervised"])

    def loss_of_step(_: int) -> Tensor:
        return next_token_loss(
            model, pad_rows([encode(tokenizer, *grammar.scene(rng)) for _ in range(recipe.sft_batch)])
        )

    loss = optimise(model, recipe.sft_steps, recipe.sft_lr, loss_of_step, "supervised")
    fresh = random.Random(SEEDS["held_out"])
    tokens_BT = pad_rows([encode(tokenizer, *grammar.scene(fresh)) for _ in range(512)])
    with torch.no_grad():
        return {"supervised_loss": loss, "supervised_loss_held_out": next_token_loss(model, tokens_BT).item()}


# -- preference pairs ----


def continuations(
    model: Transformer, tokenizer, starts: list[str], seed: int, recipe: Recipe
) -> list[tuple[str, bool]]:
    """The model's continuation of each opening at temperature 1, and whether it ended."""
    index_B = torch.arange(len(starts))
    bits_BG = random_bits(seed, random_streams.OFFLINE, 0, index_B, torch.zeros_like(index_B), recipe.max_new_tokens)
    prompts_BP = pad_rows([tokenizer.encode(start) for start in starts])
    with torch.no_grad():
        responses_BG, *_ = generate_rows(
            model, prompts_BP, torch.as_tensor(bits_BG), temperature=1.0, eos_ids=(tokenizer.eos_token_id,)
        )
    rows = [[token for token in row if token >= 0] for row in responses_BG.tolist()]
    ended = [row[-1] == tokenizer.eos_token_id for row in rows]
    return [(tokenizer.decode(row[:-1] if end else row), end) for row, end in zip(rows, ended, strict=True)]


def damage(rng: random.Random, text: str) -> str:
    """Makes a continuation worse: shuffles words, drops or repeats one, repeats a sentence, or cuts the end."""
    words = text.split()
    at = rng.randrange(len(words))
    way = rng.randrange(5)
    if way == 0:
        rng.shuffle(words)
    elif way == 1:
        del words[at]
    elif way == 2:
        words[at:at] = [words[at]] * rng.randrange(1, 4)
    elif way == 3:
        words += rng.choice(text.strip().split(". ")).rstrip(".").split()
        words[-1] += "."
    else:
        words = words[: max(1, at)]
    return "".join(f" {word}" for word in words)


class Pairs:
    """Preference pairs: two continuations of one opening, of which a noisy annotator prefers one by `grammar.score`.

    A continuation is the actor's own (35 %), the grammar's (35 %), damaged (18 %) or of another opening (12 %); the
    last two score 1 less, so that the reward model also judges whether the text is complete and stays on its subject.
    """

    def __init__(self, model: Transformer, tokenizer, recipe: Recipe):
        self.rng = random.Random(SEEDS["pairs"])
        self.tokenizer, self.recipe = tokenizer, recipe
        self.starts = [grammar.opening(self.rng) for _ in range(recipe.pool)]
        texts = [start.text for start in self.starts]
        self.samples = [continuations(model, tokenizer, texts, SEEDS["pairs"] + k, recipe) for k in (100, 101)]

    def candidate(self, at: int, which: int) -> tuple[str, float]:
        """One continuation of opening `at`, with its quality."""
        way = self.rng.random()
        if way < 0.35:
            text, ended = self.samples[which][at]
            return text, grammar.score(text) - (not ended)
        start = grammar.opening(self.rng) if way > 0.88 else self.starts[at]
        text = grammar.continuation(self.rng, start)
        if way < 0.70:
            return text, grammar.score(text)
        if way < 0.88:
            text = damage(self.rng, text)
        return text, grammar.score(text) - 1

    def batch(self, num_pairs: int) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the preferred and of the rejected texts."""
        preferred, rejected = [], []
        for _ in range(num_pairs):
            at = self.rng.randrange(len(self.starts))
            (a, quality_a), (b, quality_b) = self.candidate(at, 0), self.candidate(at, 1)
            chance = 1 / (1 + math.exp(-self.recipe.annotator * (quality_a - quality_b)))
            order = (a, b) if self.rng.random() < chance else (b, a)
            for rows, text in zip((preferred, rejected), order, strict=True):
                rows.append(encode(self.tokenizer, self.starts[at].text, text))
        return preferred, rejected


# -- reward model ----


def at_last(x_BT: Tensor, tokens_BT: Tensor) -> Tensor:
    """The values at each row's last real token, [B, ...]."""
    return x_BT[torch.arange(len(tokens_BT)), (tokens_BT >= 0).sum(1) - 1]


def score_rows(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """The reward model's score of each row, [B]."""
    return at_last(model.scalar(model(tokens_BT)), tokens_BT)


def train_reward(model: Transformer, pairs: Pairs, recipe: Recipe) -> float:
    """Bradley-Terry: mean of -log sigmoid(score of the preferred - score of the rejected); returns the last loss.

    A quarter of the squared distance between the scores at earlier tokens and the last one is added, so that the model
    also predicts its final score, and a critic initialised from it is a value function from the start.
    """

    def loss_of_step(_: int) -> Tensor:
        tokens_BT = pad_rows([row for rows in pairs.batch(recipe.reward_batch) for row in rows])
        scores_BT = model.scalar(model(tokens_BT))
        last_B = at_last(scores_BT, tokens_BT)
        preferred_B, rejected_B = last_B.chunk(2)
        foresight_BT = (scores_BT - last_B.detach()[:, None]).square()
        return -logsigmoid(preferred_B - rejected_B).mean() + recipe.foresight * foresight_BT[tokens_BT >= 0].mean()

    return optimise(model, recipe.reward_steps, recipe.reward_lr, loss_of_step, "reward")


@torch.no_grad()
def standardise(model: Transformer, tokens_BT: Tensor) -> None:
    """Changes the score head so that the scores of these rows have mean 0 and standard deviation 1.

    The head has no bias, so the mean is moved along the direction in which the hidden states are most nearly constant:
    d = argmin |H d - 1|^2 over all tokens.
    """
    hidden_BTD = model(tokens_BT).double()
    every_ND, last_BD = hidden_BTD[tokens_BT >= 0], at_last(hidden_BTD, tokens_BT)
    ridge_DD = 1e-6 * len(every_ND) * torch.eye(every_ND.shape[1], dtype=torch.float64)
    constant_D = torch.linalg.solve(every_ND.T @ every_ND + ridge_DD, every_ND.sum(0))
    mean_D, head_D = last_BD.mean(0), model.score.weight[0].double()
    head_D = head_D - (mean_D @ head_D) / (mean_D @ constant_D) * constant_D
    model.score.weight[0] = (head_D / (last_BD @ head_D).std()).to(model.score.weight.dtype)


def accuracy(model: Transformer, tokenizer, rng: random.Random, num_pairs: int = 1000, margin: float = 0.1) -> float:
    """The share of fresh pairs, with scores more than `margin` apart, that the reward model ranks like the grammar."""
    better, worse = [], []
    while len(better) < num_pairs:
        start = grammar.opening(rng)
        a, b = sorted((grammar.continuation(rng, start) for _ in range(2)), key=grammar.score)
        if grammar.score(b) - grammar.score(a) > margin:
            better.append(encode(tokenizer, start.text, b))
            worse.append(encode(tokenizer, start.text, a))
    with torch.no_grad():
        return (score_rows(model, pad_rows(better)) > score_rows(model, pad_rows(worse))).float().mean().item()


# -- everything ----


def round_weights(model: Transformer) -> None:
    """Rounds to bfloat16, as in the saved files, so that the shipped models are measured."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def new_model(recipe: Recipe, tokenizer, head: str) -> Transformer:
    """A freshly initialised model of the recipe's shape."""
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


def make(out: Path, recipe: Recipe) -> dict:
    """Makes everything in `out`; returns the contents of made.json."""
    started = time.monotonic()
    train_tokenizer(out / "actor", recipe)
    tokenizer = load_tokenizer(out / "actor")

    actor = new_model(recipe, tokenizer, "lm")
    made = {"parameters": sum(p.numel() for p in actor.parameters()), **supervise(actor, tokenizer, recipe)}
    round_weights(actor)

    reward = new_model(recipe, tokenizer, "scalar")
    reward.load_state_dict(actor.state_dict(), strict=False)
    torch.nn.init.zeros_(reward.score.weight)
    made["reward_loss"] = train_reward(reward, Pairs(actor, tokenizer, recipe), recipe)
    round_weights(reward)

    rng = random.Random(SEEDS["prompts"])
    prompts = sorted({grammar.opening(rng).text for _ in range(recipe.num_prompts)})
    rng.shuffle(prompts)
    samples = continuations(actor, tokenizer, prompts, SEEDS["centre"], recipe)
    ended = [encode(tokenizer, start, text) for start, (text, end) in zip(prompts, samples, strict=True) if end]
    standardise(reward, pad_rows(ended))
    round_weights(reward)
    with torch.no_grad():
        scores_B = score_rows(reward, pad_rows(ended))
    made |= {
        "reward_accuracy_held_out": accuracy(reward, tokenizer, random.Random(SEEDS["held_out"])),
        "reward_mean_of_actor": scores_B.mean().item(),
        "reward_std_of_actor": scores_B.std().item(),
        "ended_share_of_actor": len(ended) / len(prompts),
        "grammar_score_of_actor": sum(grammar.score(text) for text, _ in samples) / len(samples),
    }
    (out / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    save_state(actor.bfloat16().state_dict(), actor.config, "lm", out / "actor")
    save_state(reward.bfloat16().state_dict(), reward.config, "scalar", out / "reward", tokenizer=tokenizer)
    made = {key: round(value, 4) for key, value in made.items()}
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "tokenizers": version("tokenizers")}
    made |= {
        "recipe": asdict(recipe),
        "seeds": SEEDS,
        "versions": versions,
        "seconds": round(time.monotonic() - started),
    }
    (out / "made.json").write_text(json.dumps(made, indent=2) + "\n")
    return made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(embedded.__file__).parent / "tiny")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    made = make(options.out, Recipe())
    print("made", options.out)
    print(json.dumps(made))
    return 0
