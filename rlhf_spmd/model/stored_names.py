"""Names of tensors as programs store them, and as Hugging Face's classes with a head name them; which are needed.

Inside this program names are the usual ones, those of Llama; the page of a family says which of its own are others.

The base model (AutoModel) is stored without `model.`, and wrappers put their own names before or between those of the
model: torch.compile `_orig_mod`, DDP `module`, TRL's value head `pretrained_model`, PEFT `base_model.model`. Which
tensor is which stays certain, because the embeddings are there once and all other names are counted from theirs.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.families.family import Family

BODY = "model."
HEADS = ("lm_head.weight", "score.weight")
BIAS = "score.bias"  # that of a classifier of tokens and of TRL's value head; a head here has none
SCALAR_HEAD = re.compile(r"(?:\w+\.)*(?:score|classifier|value_head|v_head\.summary)\.(weight|bias)")
PARTS = ("embed_tokens", "embed_positions", "layers", "norm", "rotary_emb")  # of the body
USUAL = Family("")
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # that may stand anywhere
TABLES = "rotary_emb.inv_freq"  # stored in old checkpoints, computed from the config here
VALUE_HEAD = "v_head"  # of TRL, beside a language model
MERGE = "merge the adapter with peft: model.merge_and_unload().save_pretrained('MERGED'), and give that folder"
# a part of names that a model lacks -> what to do
ADVICE = {
    "lora_": MERGE,
    "base_layer": MERGE,
    "score.": "it is a critic or reward model: give a folder saved from AutoModelForCausalLM",
    "qweight": "its weights are quantised: give the original model",
}
COPY = (
    "copy all weights, or the config.json that belongs to them, or save the model again from AutoModelForCausalLM with "
    "save_pretrained()"
)


def stored_name(name: str, family: Family) -> str:
    """Converts the usual name of a tensor to that in folders of a family."""
    names = family.names
    if not name.startswith(BODY):
        module, _, kind = name.rpartition(".")
        return f"{names.get(module, module)}.{kind}"
    inner = _translated(name.removeprefix(BODY), "layers", names, family.layer_names)
    return f"{names.get('model', 'model')}.{inner}"


def _translated(name: str, layers: str, names: Mapping[str, str], layer_names: Mapping[str, str]) -> str:
    """Translates a name that begins in the body."""
    first, _, rest = name.partition(".")
    if first == layers:
        layer, _, inner = rest.partition(".")
        module, _, kind = inner.rpartition(".")
        rest = f"{layer}.{layer_names.get(module, module)}.{kind}"
    return f"{names.get(first, first)}.{rest}"


def _turned(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: usual for usual, theirs in names.items()}


def hugging_face_names(stored: Iterable[str], family: Family = USUAL) -> dict[str, str]:
    """Maps the usual name of every tensor to its stored name. A name that belongs to no model stays as it is, and so do
    all where the embeddings are not there exactly once."""
    stored, names = list(stored), family.names
    own_body, embeddings = f"{names.get('model', 'model')}.", f"{names.get('embed_tokens', 'embed_tokens')}.weight"
    parts, layers = {names.get(part, part) for part in PARTS}, names.get("layers", "layers")
    heads = {name: name for name in HEADS} | {stored_name(name, family): name for name in HEADS}
    usual, usual_in_layers = _turned(names), _turned(family.layer_names)
    plain = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in stored}
    found = [name for name in plain.values() if f".{name}".endswith(f".{embeddings}")]
    if len(found) != 1:
        return {name: name for name in stored}
    body = found[0].removesuffix(embeddings)
    is_inside = f".{body}".endswith(f".{own_body}")
    around = body.removesuffix(own_body) if is_inside else None  # None: the base model, without heads
    known: dict[str, str] = {}
    for name, text in plain.items():
        inner, outer = text.removeprefix(body), text.removeprefix(around or "")
        if text.startswith(body) and inner.partition(".")[0] in parts:
            name_here = BODY + _translated(inner, layers, usual, usual_in_layers)
        else:
            name_here = heads[outer] if text.startswith(around or "") and outer in heads else name
        known[name_here] = name
    return known if len(known) == len(stored) else {name: name for name in stored}


def with_score(stored: Mapping[str, str]) -> dict[str, str]:
    """Gives the layer with one output our name of it, whatever it is called; if there are two, all names stay."""
    heads = {name: found[1] for name in stored if (found := SCALAR_HEAD.fullmatch(name))}
    names = {f"score.{heads[name]}" if name in heads else name: there for name, there in stored.items()}
    return names if len(names) == len(stored) else dict(stored)


def check_names(
    file: Path, stored: Mapping[str, str], needed: Collection[str], family: Family, *, head: str, tied: bool
) -> list[str]:
    """Compares the tensors of a folder with those that a model needs -> the heads that start at zero. Raises UserError.

    file: that names the tensors, for messages.
    stored: of hugging_face_names.
    head: lm or scalar.
    tied: whether the embeddings are the output, too.
    """
    fresh = ["score.weight"] if head == "scalar" and "score.weight" not in stored else []
    value_head = [] if fresh else [VALUE_HEAD]  # left out where it is not the head
    ignored = ["lm_head.weight"] * (head == "scalar" or tied) + [BIAS] * (head == "scalar")
    missing = [stored_name(name, family) for name in needed if name not in stored and name not in fresh]
    extra = [there for name, there in stored.items() if name not in needed and name not in ignored]
    extra = [
        name
        for name in extra
        if not name.endswith((TABLES, *family.computed)) and {*name.split(".")}.isdisjoint(value_head)
    ]
    if missing or extra:
        advice = next((text for part, text in ADVICE.items() if any(part in name for name in extra)), COPY)
        raise UserError(
            f"{file} is not the model in config.json, with the head {head}: it {_some('lacks', missing)}"
            f"{' and ' if missing and extra else ''}{_some('holds', extra)}; {advice}"
        )
    return fresh


def _some(verb: str, names: Sequence[str]) -> str:
    """Returns what is wrong with tensors, by the first of them."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{verb} tensor {names[0]}{more}" if names else ""
