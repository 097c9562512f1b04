"""TRL's trainers around responses, rewards and old logprobs that are given to them. Runs in .venv-peers, without ours.

Everything behind the responses is TRL's own: advantages, the reference's logprobs, the loss, `Trainer.train` with its
optimizer.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.kernels import ChunkedLogProbFunction

from bench.against_trl.widened import widened

KINDS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
ON_A_CPU = {  # options of a trainer's config: no files, logs and mixed precision
    **{"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True},
    **{"use_cpu": True, "bf16": False, "lr_scheduler_type": "constant"},
}
ONE_STEP = {  # of SGD at learning rate 1
    **{"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0},
    "gradient_checkpointing": False,
}


class Given:
    """What TRL would generate and compute; rows have "prompt_index", "sample", "prompt", "response", "old", "reward".
    The k-th time that TRL asks for a prompt it gets the prompt's k-th sample."""

    def __init__(self, rows: list[dict]):
        self.rows = {(row["prompt_index"], row["sample"]): row for row in rows}
        self.prompts = sorted({prompt for prompt, _ in self.rows})
        self.order: list[dict] = []  # of the last batch

    def ask(self, prompts: list[str]) -> None:
        """prompts: the numbers of the prompts of a batch, as text."""
        seen: Counter[str] = Counter()
        self.order = []
        for prompt in prompts:
            self.order.append(self.rows[int(prompt), seen[prompt]])
            seen[prompt] += 1

    def rewards(self, prompts: list[str], completions: list[str], **_) -> list[float]:
        return [row["reward"] for row in self.order]

    def old_logprobs(self, like: Tensor) -> Tensor:
        """[rows, width] in the order of the last batch, padded as TRL pads."""
        width = max(len(row["old"]) for row in self.order)
        padded = [row["old"] + [0.0] * (width - len(row["old"])) for row in self.order]
        return torch.tensor(padded, dtype=like.dtype, device=like.device)


def with_given(kind: type, given: Given) -> type:
    """A trainer that "generates" the given responses, whose logprobs before the update are the given ones, and that
    notes its loss."""

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


class Gradients(TrainerCallback):
    """Keeps the gradients that the optimizer gets."""

    def __init__(self):
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.found = {name: weight.grad.clone() for name, weight in model.named_parameters()}


def load(folder: str, reference: str, dtype: torch.dtype):
    """A model and its tokenizer; TRL reads the reference from the folder that the model says it comes from."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.config._name_or_path = reference
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def options_of(kind: str, folder: str, **options):
    """The trainer's config."""
    return KINDS[kind][1](output_dir=folder, **ON_A_CPU, **options)


def one_step(
    kind: str, rows: list[dict], folder: str, reference: str, *, dtype: torch.dtype, limit: int, options: dict
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """One step of SGD at learning rate 1 on given rows -> the loss, gradients and weights after the step by name.
    limit: most tokens of a response. options: of TRL's config."""
    given = Given(rows)
    model, tokenizer = load(folder, reference, dtype)
    gradients = Gradients()
    with tempfile.TemporaryDirectory() as scratch:
        config = options_of(
            kind,
            scratch,
            num_generations=len(rows) // len(given.prompts),
            per_device_train_batch_size=len(rows),
            max_completion_length=limit,
            # TRL asks for old logprobs only where rows are used again
            **({"num_iterations": 2} if kind == "grpo" else {}),
            **(ONE_STEP | options),
        )
        trainer = with_given(KINDS[kind][0], given)(
            model,
            reward_funcs=given.rewards,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [str(prompt) for prompt in given.prompts]}),
            processing_class=tokenizer,
            callbacks=[gradients],
        )
        trainer.train()
    (loss,) = trainer.losses
    after = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    assert Path(reference).is_dir() and trainer.ref_model is not None
    return loss, gradients.found, after


@contextmanager
def without_casts() -> Iterator[None]:
    """`widened`, also in the backward pass of TRL's logprobs, which autograd calls outside of it."""
    real = ChunkedLogProbFunction.backward

    def backward(ctx, *gradients):
        with widened():
            return real(ctx, *gradients)

    with widened(), patch.object(ChunkedLogProbFunction, "backward", staticmethod(backward)):
        yield
