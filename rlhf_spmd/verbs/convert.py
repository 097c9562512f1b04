"""The convert verb: turns a GGUF file into a Hugging Face folder."""

import argparse
import json

from rlhf_spmd.model.hf import convert_gguf


def run(parsed: argparse.Namespace) -> int:
    """Writes the folder -> the exit status. Raises UserError."""
    convert_gguf(parsed.gguf, parsed.folder)
    print(json.dumps({"folder": str(parsed.folder), "ok": True}))
    return 0
