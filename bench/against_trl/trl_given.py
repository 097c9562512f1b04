"""TRL's half of the equality on given responses: `.venv-peers/bin/python -m bench.against_trl.trl_given JOB.json`.

SFTTrainer, RewardTrainer and DPOTrainer as they are: they read the rows, tokenise, collate, and take a step of SGD.
The job's steps are written by given.py. Each step's loss, gradients, weights, metrics and tokens go into a safetensors
file.
"""

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from bench.against_trl.trl_trainers import ON_A_CPU, ONE_STEP, Gradients, without_casts

KINDS = {
    "sft": (SFTTrainer, SFTConfig),
    "reward_model": (RewardTrainer, RewardConfig),
    "dpo": (DPOTrainer, DPOConfig),
}
Sequence = tuple[list[int], list[int]]  # tokens, and 1 for each that is learned


def noting(kind: type) -> type:
    """A trainer that notes its losses and the batches that they are of."""

    class Trainer(kind):
        losses: list[float] = []
        batches: list[dict[str, Tensor]] = []

        def compute_loss(self, model, inputs, *args, **kwargs):
            self.batches.append(dict(inputs))
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            self.losses.append(loss.item())
            return loss

    return Trainer


def load(kind: str, folder: str, dtype: torch.dtype):
    if kind == "reward_model":
        return AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, num_labels=1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def one_step(step: dict) -> tuple[dict[str, Tensor], dict[str, str]]:
    """One step of SGD at learning rate 1 -> gradients and weights after it; loss, metrics and tokens as JSON."""
    kind, dtype = step["kind"], getattr(torch, step["dtype"])
    trainer_class, config_class = KINDS[kind]
    rows = json.loads(Path(step["rows"]).read_text(encoding="utf-8"))
    reference = {"ref_model": load(kind, step["reference"], dtype)} if kind == "dpo" else {}
    gradients = Gradients()
    with tempfile.TemporaryDirectory() as scratch:
        sizes = {"per_device_train_batch_size": len(rows)}
        trainer = noting(trainer_class)(
            load(kind, step["model"], dtype),
            args=config_class(output_dir=scratch, **ON_A_CPU, **ONE_STEP, **sizes, **step["options"]),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(step["model"]),
            callbacks=[gradients],
            **reference,
        )
        trainer.train()
    ((loss,), (batch,)) = trainer.losses, trainer.batches
    assert ("attention_mask" not in batch) == step["options"].get("packing", False)
    tensors = {f"gradient {name}": tensor for name, tensor in gradients.found.items()}
    tensors |= {f"after {name}": weight.detach().contiguous() for name, weight in trainer.model.named_parameters()}
    metrics = {name: value for name, value in trainer.state.log_history[-1].items() if isinstance(value, float)}
    return tensors, {"loss": repr(loss), "metrics": json.dumps(metrics), "rows": json.dumps(read(kind, batch))}


def read(kind: str, batch: dict[str, Tensor]) -> list[list[Sequence]]:
    """The sequences of each row: one, or that of the chosen and that of the rejected response."""
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
    """Sequences behind each other in one row, if the batch is one."""
    if "attention_mask" in batch:
        return []
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], batch["position_ids"].shape[1]]
    tokens, learned = batch["input_ids"][0], (batch["labels"][0] != -100).int()
    return [(tokens[a:b].tolist(), learned[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]


def main(path: str) -> None:
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    for step in job["steps"]:
        with without_casts() if step["wide"] else nullcontext():
            tensors, about = one_step(step)
        save_file(tensors, step["out"], about)
    print(json.dumps({"ok": True}))


if __name__ == "__main__":
    main(sys.argv[1])
