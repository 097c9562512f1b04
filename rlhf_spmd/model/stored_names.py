"""Names of tensors as programs store them, and as Hugging Face's classes with a head name them; which are needed.

The base model (AutoModel) is stored without `model.`, and wrappers put their own names before or between those of the
model: torch.compile `_orig_mod`, DDP `module`, TRL's value head `pretrained_model`, PEFT `base_model.model`. Which
tensor is which stays certain, because the embeddings are there once and all other names are counted from theirs.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rlhf_spmd.errors import UserError

EMBEDDINGS, BODY = "embed_tokens.weight", "model."
HEADS = ("lm_head.weight", "score.weight")
PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")  # of the body
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # that may stand anywhere
TABLES = "rotary_emb.inv_freq"  # stored in old checkpoints, computed from the config here
VALUE_HEAD = "v_head"  # of TRL: a layer with a bias, beside a language model
OF_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "base_layer", "modules_to_save")


def hugging_face_names(stored: Iterable[str]) -> dict[str, str]:
    """Maps Hugging Face's name of every tensor to its stored name. A name that belongs to no model stays as it is, and
    so do all where the embeddings are not there exactly once."""
    stored = list(stored)
    plain = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in stored}
    found = [name for name in plain.values() if f".{name}".endswith(f".{EMBEDDINGS}")]
    if len(found) != 1:
        return {name: name for name in stored}
    body = found[0].removesuffix(EMBEDDINGS)
    around = body.removesuffix(BODY) if f".{body}".endswith(f".{BODY}") else None  # None: the base model, without heads
    names: dict[str, str] = {}
    for name, text in plain.items():
        inner, outer = text.removeprefix(body), text.removeprefix(around or "")
        if text.startswith(body) and inner.partition(".")[0] in PARTS:
            name_here = BODY + inner
        else:
            name_here = outer if text.startswith(around or "") and outer in HEADS else name
        names[name_here] = name
    return names if len(names) == len(stored) else {name: name for name in stored}


def check_names(file: Path, stored: Mapping[str, str], needed: Collection[str], *, head: str, tied: bool) -> list[str]:
    """Compares the tensors of a folder with those that a model needs -> the heads that start at zero. Raises UserError.

    file: that names the tensors, for messages.
    stored: of hugging_face_names.
    head: lm or scalar.
    tied: whether the embeddings are the output, too.
    """
    if adapter := _with_parts(stored.values(), OF_ADAPTERS):
        raise UserError(
            f"{file} holds an adapter within its base (tensor {adapter[0]}), which is not read; merge it with peft: "
            "model.merge_and_unload().save_pretrained('MERGED'), and give that folder"
        )
    if head == "lm" and "score.weight" in stored:
        raise UserError(
            f"{file} holds a critic or reward model (tensor score.weight), not a language model; give a folder saved "
            "from AutoModelForCausalLM"
        )
    fresh = ["score.weight"] if head == "scalar" and "score.weight" not in stored else []
    missing = [name for name in needed if name not in stored and name not in fresh]
    if missing:
        other = next((name for name in stored.values() if name not in HEADS), "none")
        raise UserError(
            f"{file} lacks tensor {missing[0]}{_more(missing)}, which config.json requires; its tensors have names "
            f"such as {other}: copy all weights, or the config.json that belongs to them, or save the model again from "
            "AutoModelForCausalLM with save_pretrained()"
        )
    value_head = _with_parts(stored.values(), [VALUE_HEAD])
    if fresh and value_head:
        raise UserError(
            f"{file} holds a value head of TRL (tensor {value_head[0]}), which a critic here cannot have because of "
            "its bias; give the critic another folder, or remove these tensors, and it begins with zeros"
        )
    ignored = {*value_head, *(["lm_head.weight"] if head == "scalar" or tied else [])}
    extra = [there for name, there in stored.items() if name not in needed and name not in ignored]
    if extra := [name for name in extra if not name.endswith(TABLES)]:
        raise UserError(
            f"{file} holds tensor {extra[0]}{_more(extra)}, which the model in config.json does not have; the two "
            "files do not belong together"
        )
    return fresh


def _with_parts(names: Iterable[str], parts: Iterable[str]) -> list[str]:
    """Returns the names that have one of these parts."""
    return [name for name in names if not {*name.split(".")}.isdisjoint(parts)]


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
