"""TRL's half of the equality: `.venv-peers/bin/python -m bench.against_trl.trl_losses JOB.json`; prints one JSON line.

The job names models, precision and steps (against_trl.py writes it). Each step's loss, gradients and weights go into a
safetensors file.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.against_trl.trl_trainers import one_step, without_casts


def main(path: str) -> None:
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    for step in job["steps"]:
        with without_casts() if step["wide"] else nullcontext():
            loss, gradients, after = taken(step)
        tensors = {f"gradient {name}": tensor for name, tensor in gradients.items()}
        tensors |= {f"after {name}": tensor for name, tensor in after.items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, step["out"], {"loss": repr(loss)})
    print(json.dumps({"ok": True}))


def taken(step: dict):
    return one_step(
        step["kind"],
        json.loads(Path(step["rows"]).read_text(encoding="utf-8")),
        step["model"],
        step["reference"],
        dtype=getattr(torch, step["dtype"]),
        limit=step["limit"],
        options=step["options"],
    )


if __name__ == "__main__":
    main(sys.argv[1])
