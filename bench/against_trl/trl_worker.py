"""TRL's worker: `.venv-peers/bin/python -m bench.against_trl.trl_worker FOLDER [MODEL WORK RANK]`.

For the equality: TRL's trainers as they are, around responses that are given to them. SFTTrainer, RewardTrainer and
DPOTrainer read the rows, tokenise and collate; to GRPOTrainer and RLOOTrainer also rewards and old logprobs are given,
and everything behind these is their own. Each takes a step of SGD. Loss and, of given responses, metrics and tokens are
answered, and gradients and weights go into a safetensors file.

For whole steps: the same trainers, but that each step waits for a command. GRPOTrainer's responses end at the lengths
that the command gives: a logits processor of transformers allows the end token there and nowhere else. The others take
a step over all micro-batches of the set. RANK: of peft's adapters of all linear layers; 0: all weights train.
"""

import functools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.kernels import ChunkedLogProbFunction

from bench.against_trl import work
from bench.against_trl.widened import widened
from bench.against_trl.work import GRPO, KNOWN, Work

GENERATING = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
KINDS = GENERATING | {
    "sft": (SFTTrainer, SFTConfig),
    "reward_model": (RewardTrainer, RewardConfig),
    "dpo": (DPOTrainer, DPOConfig),
}
ON_A_CPU = {  # options of a trainer's config: no files, logs and mixed precision
    **{"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True},
    **{"use_cpu": True, "bf16": False, "lr_scheduler_type": "constant"},
}


ONE_STEP = {  # of SGD at learning rate 1
    **{"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0},
    "gradient_checkpointing": False,
}
ENDLESS = {"max_steps": 10_000, "learning_rate": work.LR} | ON_A_CPU
Sequence = tuple[list[int], list[int]]  # tokens, and 1 for each that is learned


def load(kind: str, folder: str, dtype: torch.dtype, reference: str | None = None):
    """Loads a model.

    reference: where a trainer that generates finds its reference: TRL reads it from the folder that the model says it
        comes from.
    """
    if kind == "reward_model":
        return AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, num_labels=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if kind in GENERATING:
        model.config._name_or_path = reference or folder
    return model


def tokenizer_of(folder: str):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


# ---- single steps ---------------------------------------------------------------------------------------------------


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
    """Returns a trainer that "generates" the given responses, whose logprobs before the update are the given ones."""

    class Trainer(kind):
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


def one_step(step: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Makes a step of SGD at learning rate 1, and writes gradients and weights after it. Returns what is told of it."""
    kind, rows = step["kind"], step["rows"]
    trainer_class, config_class = KINDS[kind]
    options = ONE_STEP | {"per_device_train_batch_size": len(rows)} | step["options"]
    if kind in GENERATING:
        given = Given(rows)
        trainer_class = with_given(trainer_class, given)
        data_set = Dataset.from_dict({"prompt": [str(prompt) for prompt in given.prompts]})
        more = {"reward_funcs": given.rewards}
        options["num_generations"] = len(rows) // len(given.prompts)
        if kind == "grpo":
            options["num_iterations"] = 2  # TRL asks for old logprobs only where rows are used again
    else:
        data_set = Dataset.from_list(rows)
        more = {"ref_model": load(kind, step["reference"], torch.float64)} if kind == "dpo" else {}
    gradients = Gradients()
    trainer = noting(trainer_class)(
        load(kind, step["model"], torch.float64, step["reference"]),
        args=config_class(output_dir=scratch, **ON_A_CPU, **options),
        train_dataset=data_set,
        processing_class=tokenizer_of(step["model"]),
        callbacks=[gradients],
        **more,
    )
    trainer.train()
    (loss,), (batch,) = trainer.losses, trainer.batches
    tensors = {f"gradient {name}": tensor.contiguous() for name, tensor in gradients.found.items()}
    weights = trainer.model.named_parameters()
    save_file(tensors | {f"after {name}": weight.detach().contiguous() for name, weight in weights}, step["out"])
    if kind in GENERATING:
        assert "old_per_token_logps" in batch or "old_logps" in batch, "old logprobs are not asked for"
        assert Path(step["reference"]).is_dir() and trainer.ref_model is not None
        return {"loss": loss}
    assert ("attention_mask" not in batch) == step["options"].get("packing", False)
    metrics = {name: value for name, value in trainer.state.log_history[-1].items() if isinstance(value, float)}
    return {"loss": loss, "metrics": metrics, "rows": read(kind, batch)}


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


# ---- whole steps ----------------------------------------------------------------------------------------------------


class OnCommand(TrainerCallback):
    """Waits for a command before each step, and answers after it."""

    trainer: "Timed | None" = None  # which generates

    def __init__(self):
        self.told, self.answer = work.commands()

    def on_step_begin(self, args, state, control, **_):
        told = next(self.told, None)
        if told is None:
            sys.exit(0)
        if self.trainer:
            self.trainer.prepare(**told)
        self.step = work.Step()

    def on_step_end(self, args, state, control, **_):
        self.answer(**self.step.took(), **(self.trainer.phases if self.trainer else {}))


class EndAt(LogitsProcessor):
    """Each row draws the end token as its last token, and not before."""

    def __init__(self, eos: int):
        self.eos, self.start, self.lengths = eos, 0, torch.zeros(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.eos] = -torch.inf
        last = self.lengths == input_ids.shape[1] - self.start + 1
        if last.any():
            scores[last] = -torch.inf
            scores[last, self.eos] = 0.0
        return scores


class Timed(GRPOTrainer):
    """Notes the seconds of generation and of the reference's pass."""

    ends: EndAt
    phases: dict[str, float] = {}

    def prepare(self, lengths: list[int], *, checkpointing: bool) -> None:
        """Prepares a step before its clock starts."""
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        else:
            self.model.gradient_checkpointing_disable()
        self.ends.lengths = torch.tensor(lengths)
        self.phases.clear()

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.ends.start = max(map(len, prompt_ids))
        with self._noted("generation"):
            found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        assert sorted(map(len, found[0])) == sorted(self.ends.lengths.tolist()), "responses of other lengths"
        return found

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        assert model is self.ref_model, "old logprobs are those of the update"
        with self._noted("reference"):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    @contextmanager
    def _noted(self, name: str):
        started = time.process_time()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.process_time() - started


def grpo_trainer(folder: str, scratch: str) -> Timed:
    model, tokenizer, on_command = load("grpo", folder, torch.float32), tokenizer_of(folder), OnCommand()
    ends = EndAt(tokenizer.eos_token_id)
    model.generate = functools.partial(model.generate, logits_processor=LogitsProcessorList([ends]))
    config = GRPOConfig(
        output_dir=scratch,
        num_generations=work.SAMPLES,
        per_device_train_batch_size=work.MICRO_BATCH,
        gradient_accumulation_steps=work.PROMPTS * work.SAMPLES // work.MICRO_BATCH,
        max_completion_length=work.LIMIT,
        beta=work.KL,
        **ENDLESS,
    )
    on_command.trainer = trainer = Timed(
        model,
        reward_funcs=lambda prompts, completions, **_: work.letters(prompts, completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": work.prompts()}),
        processing_class=tokenizer,
        callbacks=[on_command],
    )
    trainer.ends = ends
    return trainer


# ---- given responses ------------------------------------------------------------------------------------------------


def given_trainer(of: Work, model: str, scratch: str, rank: int):
    """Makes a trainer without checkpointing of activations."""
    trainer_class, config_class = KINDS[of.page]
    rows = work.rows_of(of)
    micro_batch = 1 if of.packs else work.GIVEN_MICRO_BATCH // of.sequences_per_row
    more = {"ref_model": load("dpo", model, torch.float32)} if of.page == "dpo" else {}
    if rank:  # the reference is the base
        more = {"peft_config": LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")}
    options = {"gradient_checkpointing": False, "max_length": work.MOST_TOKENS}
    options |= {"per_device_train_batch_size": micro_batch} | ENDLESS | of.theirs

    def made(num_micro_batches: int, callbacks: list[TrainerCallback]):
        return trainer_class(
            load(of.page, model, torch.float32),
            args=config_class(output_dir=scratch, gradient_accumulation_steps=num_micro_batches, **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer_of(model),
            callbacks=callbacks,
            **more,
        )

    # only a trainer knows how many rows packing leaves
    num_rows = len(made(1, []).train_dataset) if of.packs else len(rows)
    return made(num_rows // micro_batch, [OnCommand()])


def main(folder: str, model: str = "", name: str = "", rank: str = "0") -> None:
    torch.set_num_threads(1 if name else work.THREADS)
    if name == GRPO:
        grpo_trainer(model, folder).train()
    elif name:
        given_trainer(KNOWN[name], model, folder, int(rank)).train()
    else:
        steps, answer = work.commands()
        for step in steps:
            with without_casts() if step["wide"] else nullcontext():
                answer(**one_step(step, folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
