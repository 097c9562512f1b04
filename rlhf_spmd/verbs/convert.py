"""The convert verb: turns a GGUF file into a Hugging Face folder."""

import argparse

from rlhf_spmd.model.hf import convert_gguf
from rlhf_spmd.runtime.guard.terminal import print_json


def run(parsed: argparse.Namespace) -> int:
    """Writes the folder -> the exit status. Raises UserError."""
    convert_gguf(parsed.gguf, parsed.folder)
    print(f"{parsed.folder}: a Hugging Face folder")
    print_json({"folder": str(parsed.folder), "ok": True}, parsed.json)
    return 0
