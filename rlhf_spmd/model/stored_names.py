"""Names of tensors as programs store them, and as Hugging Face's classes with a head name them.

The base model (AutoModel) is stored without `model.`, and wrappers put their own names before or between those of the
model: torch.compile `_orig_mod`, DDP `module`, TRL's value head `pretrained_model`, PEFT `base_model.model`. Which
tensor is which stays certain, because the embeddings are there once and all other names are counted from theirs.
"""

from collections.abc import Iterable, Mapping

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


def prefix_of(stored: Mapping[str, str]) -> str:
    """Returns the prefix of the names of the body: `model.`, less in a base model, more in a wrapper. stored: of
    hugging_face_names."""
    return stored.get(BODY + EMBEDDINGS, BODY + EMBEDDINGS).removesuffix(EMBEDDINGS)


def tensors_of(stored: Iterable[str], parts: Iterable[str]) -> list[str]:
    """Returns the names that have one of these parts."""
    return [name for name in stored if not {*name.split(".")}.isdisjoint(parts)]
