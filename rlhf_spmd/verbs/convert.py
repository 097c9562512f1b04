"""The convert subcommand: turns a GGUF file, or an adapter with its base, into a Hugging Face folder of a whole
model."""

import argparse
import sys

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.output import print_json
from rlhf_spmd.model.adapters.merge import merge
from rlhf_spmd.model.adapters.uniform import other_base
from rlhf_spmd.model.hf import convert_gguf


def run(parsed: argparse.Namespace) -> int:
    """Writes the folder -> the exit status. Raises UserError."""
    result = {"folder": str(parsed.folder), "ok": True}
    if parsed.merge:
        if parsed.base and (named := other_base(str(parsed.source), str(parsed.base))):
            _note(
                f"{parsed.source} was made for {named}, whose files have other weights than {parsed.base}; the result "
                "is right only if that is the same model, such as in another precision"
            )
        merged = merge(parsed.source, parsed.folder, base=parsed.base)
        result |= {"updated": merged.num_updated, "lost": merged.num_lost}
        if merged.num_lost and merged.dtype.itemsize < 4:
            _note(
                f"rounding to {merged.dtype}, the type of the base, loses the update of {merged.num_lost:,} of "
                f"{merged.num_updated:,} weights; to keep it give --base F, a folder in float32 that "
                "transformers writes: AutoModelForCausalLM.from_pretrained(BASE, dtype='float32').save_pretrained(F)"
            )
    elif parsed.base:
        raise UserError("--base is the base of an adapter; add --merge, or drop it")
    else:
        convert_gguf(parsed.source, parsed.folder)
    print(f"{parsed.folder}: a Hugging Face folder")
    print_json(result, parsed.json)
    return 0


def _note(text: str) -> None:
    print(f"rlhf_spmd: note: {text}", file=sys.stderr)
