"""TRL's half of the equality: `.venv-peers/bin/python -m bench.against_trl.trl_equality JOB.json`.

TRL's trainers as they are, around responses that are given to them: SFTTrainer, RewardTrainer and DPOTrainer read the
rows, tokenise and collate; to GRPOTrainer and RLOOTrainer also rewards and old logprobs are given, and everything
behind these is their own. Each takes a step of SGD. The job's steps are written by equality.py; loss, gradients,
weights and, of given responses, metrics and tokens go into a safetensors file.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.kernels import ChunkedLogProbFunction

from bench.against_trl.trl_trainers import GENERATING, KINDS, ON_A_CPU, load, tokenizer_of
from bench.against_trl.widened import widened

ONE_STEP = {  # of SGD at learning rate 1
    **{"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0},
    "gradient_checkpointing": False,
}
Sequence = tuple[list[int], list[int]]  # tokens, and 1 for each that is learned


class Given:
    """What TRL would generate and compute; rows have "prompt_index", "sample", "prompt", "response", "old", "reward".
    The k-th time that TRL asks for a prompt it gets the prompt's k-th sample."""

    def __init__(self, rows: list[dict]):
        self.rows = {(row["prompt_index"], row["sample"]): row for row in rows}
        self.prompts = sorted({prompt for prompt, _ in self.rows})
        self.order: list[dict] = []  # of the last batch

    def ask(self, prompts: list[str]) -> None:
        """Returns scores.

        prompts: the numbers of the prompts of a batch, as text.
        """
        seen: Counter[str] = Counter()
        self.order = []
        for prompt in prompts:
            self.order.append(self.rows[int(prompt), seen[prompt]])
            seen[prompt] += 1

    def rewards(self, prompts: list[str], completions: list[str], **_) -> list[float]:
        return [row["reward"] for row in self.order]

    def old_logprobs(self, like: Tensor) -> Tensor:
        """Returns [rows, width] in the order of the last batch, padded as TRL pads."""
        width = max(len(row["old"]) for row in self.order)
        padded = [row["old"] + [0.0] * (width - len(row["old"])) for row in self.order]
        return torch.tensor(padded, dtype=like.dtype, device=like.device)


def with_given(kind: type, given: Given) -> type:
    """Returns a trainer that "generates" the given responses, whose logprobs before the update are the given ones, and
    that notes its loss."""

    class Trainer(kind):
        losses: list[float] = []

        def _tokenize_prompts(self, prompts):
            given.ask(prompts)
            return [row["prompt"] for row in given.order], None, {}

        def _generate_single_turn(self, *args, **kwargs):
            responses = [row["response"] for row in given.order]
            return (responses, None) if kind is GRPOTrainer else responses

        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            if torch.is_grad_enabled() or model is not self.model:
                return found
            return given.old_logprobs(found[0]), *found[1:]

        def _compute_loss(self, model, inputs):
            assert "old_per_token_logps" in inputs or "old_logps" in inputs, "old logprobs are not asked for"
            loss = super()._compute_loss(model, inputs)
            self.losses.append(loss.item())
            return loss

    return Trainer


def noting(kind: type) -> type:
    """Returns a trainer that notes its losses and the batches that they are of."""

    class Trainer(kind):
        losses: list[float] = []
        batches: list[dict[str, Tensor]] = []

        def compute_loss(self, model, inputs, *args, **kwargs):
            self.batches.append(dict(inputs))
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            self.losses.append(loss.item())
            return loss

    return Trainer


class Gradients(TrainerCallback):
    """Keeps the gradients that the optimizer gets."""

    def __init__(self):
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.found = {name: weight.grad.clone() for name, weight in model.named_parameters()}


def one_step(step: dict) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Makes one step of SGD at learning rate 1. Returns gradients and weights after it, and what is told of it, as
    JSON."""
    kind, rows = step["kind"], json.loads(Path(step["rows"]).read_text(encoding="utf-8"))
    trainer_class, config_class = KINDS[kind]
    options = ONE_STEP | {"per_device_train_batch_size": len(rows)} | step["options"]
    if kind in GENERATING:
        given = Given(rows)
        trainer_class, data = with_given(trainer_class, given), {"prompt": [str(prompt) for prompt in given.prompts]}
        data_set, more = Dataset.from_dict(data), {"reward_funcs": given.rewards}
        options["num_generations"] = len(rows) // len(given.prompts)
        if kind == "grpo":
            options["num_iterations"] = 2  # TRL asks for old logprobs only where rows are used again
    else:
        trainer_class, data_set = noting(trainer_class), Dataset.from_list(rows)
        more = {"ref_model": load(kind, step["reference"], torch.float64)} if kind == "dpo" else {}
    gradients = Gradients()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_class(
            load(kind, step["model"], torch.float64, step["reference"]),
            args=config_class(output_dir=scratch, **ON_A_CPU, **options),
            train_dataset=data_set,
            processing_class=tokenizer_of(step["model"]),
            callbacks=[gradients],
            **more,
        )
        trainer.train()
    (loss,) = trainer.losses
    told = {"loss": repr(loss)}
    if kind in GENERATING:
        assert Path(step["reference"]).is_dir() and trainer.ref_model is not None
    else:
        (batch,) = trainer.batches
        assert ("attention_mask" not in batch) == step["options"].get("packing", False)
        metrics = {name: value for name, value in trainer.state.log_history[-1].items() if isinstance(value, float)}
        told |= {"metrics": json.dumps(metrics), "rows": json.dumps(read(kind, batch))}
    tensors = {f"gradient {name}": tensor.contiguous() for name, tensor in gradients.found.items()}
    weights = trainer.model.named_parameters()
    return tensors | {f"after {name}": weight.detach().contiguous() for name, weight in weights}, told


def read(kind: str, batch: dict[str, Tensor]) -> list[list[Sequence]]:
    """Reads the sequences of each row: one, or that of the chosen and that of the rejected response."""
    if kind == "sft":
        return [[sequence] for sequence in _packed(batch) or _padded(batch, batch["labels"] != -100)]
    learned = batch["completion_mask"] if kind == "dpo" else batch["attention_mask"]
    sequences = _padded(batch, learned)
    half = len(sequences) // 2
    return [list(pair) for pair in zip(sequences[:half], sequences[half:], strict=True)]


def _padded(batch: dict[str, Tensor], learned: Tensor) -> list[Sequence]:
    found = []
    for tokens, marks, here in zip(batch["input_ids"], learned, batch["attention_mask"].bool(), strict=True):
        found.append((tokens[here].tolist(), [0, *marks[here].int().tolist()[1:]]))  # nothing predicts the first token
    return found


def _packed(batch: dict[str, Tensor]) -> list[Sequence]:
    """Returns the sequences of one packed row, if the batch is one."""
    if "attention_mask" in batch:
        return []
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], batch["position_ids"].shape[1]]
    tokens, learned = batch["input_ids"][0], (batch["labels"][0] != -100).int()
    return [(tokens[a:b].tolist(), learned[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]


@contextmanager
def without_casts() -> Iterator[None]:
    """Applies `widened` also in the backward pass of TRL's logprobs, which autograd calls outside of it."""
    real = ChunkedLogProbFunction.backward

    def backward(ctx, *gradients):
        with widened():
            return real(ctx, *gradients)

    with widened(), patch.object(ChunkedLogProbFunction, "backward", staticmethod(backward)):
        yield


def main(path: str) -> None:
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    for step in job["steps"]:
        with without_casts() if step["wide"] else nullcontext():
            tensors, told = one_step(step)
        save_file(tensors, step["out"], told)


if __name__ == "__main__":
    main(sys.argv[1])
