"""Reads and writes Hugging Face folders: config, weights, tokenizer, GGUF. The only file that may import transformers.

Every rank loads models, so that must not import transformers, which takes seconds; it is imported only to convert a
GGUF file and for a tokenizer without tokenizer.json. transformers' AutoModelForCausalLM,
AutoModelForSequenceClassification and AutoTokenizer can load the written folders.
"""

import dataclasses
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.model import config as model_config
from rlhf_spmd.model import weights
from rlhf_spmd.model.config import ModelConfig, naming, read_json
from rlhf_spmd.model.parallel import WHOLE, Parallel, slice_of
from rlhf_spmd.model.tokenizer import Tokenizer, padding_token
from rlhf_spmd.model.tokenizer_files import TOKENIZER_FILES
from rlhf_spmd.model.transformer import Head, Transformer

MAX_SHARD_BYTES = 5 * 10**9
_HEADS = ("lm_head.weight", "score.weight")
_TABLES = re.compile(r"rotary_emb\.inv_freq$")  # stored in old checkpoints, computed from the config here


def read_config(folder: str | Path) -> ModelConfig:
    """The shape of the model in a folder, from config.json; end-of-sequence ids from generation_config.json, if given.

    Raises UserError for a missing folder or file, and for an unsupported family or feature.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a local model folder in Hugging Face's format")
    config = model_config.read_config_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = read_json(generation).get("eos_token_id")
        with naming(generation):
            config = dataclasses.replace(config, eos_token_ids=model_config.token_ids(eos) or config.eos_token_ids)
    return config


def load_model(
    folder: str | Path,
    *,
    head: Head,
    fresh_head: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    parallel: Parallel = WHOLE,
) -> Transformer:
    """The model in a folder, or one shard of it, its weights in `dtype` on `device`.

    Every rank checks the names and shapes of the whole model, but reads only the slices of its shard.

    head "lm" needs a causal language model. head "scalar" is read from a folder of AutoModelForSequenceClassification
    with one label. From a causal language model it starts at zero if `fresh_head` (for a critic; the scores of a reward
    model would all be 0).
    Raises UserError naming file and tensor if a tensor is missing, unexpected, truncated or of a wrong shape.
    """
    folder = Path(folder)
    config = read_config(folder)
    whole = Transformer(config, head=head, dtype=dtype, device="meta")
    model = Transformer(config, head=head, dtype=dtype, device="meta", parallel=parallel)
    places = weights.locate(folder)
    shapes = {_to_hf_name(name): weight.shape for name, weight in whole.state_dict().items()}
    parts = {_to_hf_name(name): slice_of(name, config, parallel.shard) for name in model.state_dict()}
    missing_head = _check_names(folder, config, head, places, shapes)
    if missing_head and not fresh_head:
        raise UserError(
            f"{_file(folder)} has no tensor {missing_head[0]}, so it is not a reward model; give a folder saved from "
            "AutoModelForSequenceClassification with num_labels=1"
        )
    for name in missing_head:
        shapes.pop(name)

    tensors = weights.read_weights(places, shapes, lambda tensor: tensor.to(device=device, dtype=dtype), parts)
    if head == "lm":
        _check_tied(config, places, shapes, tensors, parts)
    for name in missing_head:  # a fresh critic's values are zero
        if name in parts:
            tensors[name] = torch.zeros(1, config.hidden_size, dtype=dtype, device=device)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, assign=True)
    return model


def save_state(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    head: Head,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    source: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes weights with our names (`Transformer.state_dict()`, or gathered elsewhere) as a Hugging Face folder.

    source: the folder the model came from; its tokenizer files and generation_config.json are copied. tokenizer:
    replaces the tokenizer files of `source`. AutoModelForSequenceClassification pools at the last token that is not
    padding. If a model with a scalar head pads with its end-of-sequence token, config and tokenizer therefore get
    another special token for padding, so that a final end of sequence is pooled.
    """
    folder = Path(folder)
    shapes = {name: weight.shape for name, weight in Transformer(config, head=head, device="meta").state_dict().items()}
    assert {name: tensor.shape for name, tensor in state.items()} == shapes, "state does not fit the config"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_folder = tokenizer.folder if tokenizer is not None else source
    if tokenizer_folder is not None:
        _copy(Path(tokenizer_folder), folder, TOKENIZER_FILES)
    if head == "scalar":
        config = dataclasses.replace(config, pad_token_id=padding_token(folder, config))
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    weights.write_weights(folder, {_to_hf_name(n): t for n, t in state.items()}, max_shard_bytes=max_shard_bytes)
    weights.write_json(folder / "config.json", model_config.to_hf(config, head=head, dtype=dtype))
    if source is not None and (Path(source) / "generation_config.json").exists():
        _copy(Path(source), folder, ("generation_config.json",))
    else:
        values = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
        values["eos_token_id"] = model_config.to_hf(config, head=head, dtype=dtype)["eos_token_id"]
        values = {name: value for name, value in values.items() if value is not None}
        weights.write_json(folder / "generation_config.json", values)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in a model folder, read with the light `tokenizers` package if there is a tokenizer.json.

    Raises UserError if the folder has no readable tokenizer.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").exists():
        return Tokenizer.from_json(folder)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UserError(f"{folder} holds no tokenizer; copy tokenizer.json and tokenizer_config.json there")
    return transformers_tokenizer(folder)


def transformers_tokenizer(folder: Path, *, generic: bool = False) -> Tokenizer:
    """The tokenizer in a folder as transformers reads it, by its class for the model or, if `generic`, by the class
    that does what tokenizer.json says. Raises UserError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        found = (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers and its many backends raise, the cause is the folder
        fix = "correct its files" if (folder / "tokenizer.json").exists() else "add a tokenizer.json"
        raise UserError(f"{folder}: transformers cannot read the tokenizer ({error}); {fix}") from None
    return Tokenizer.from_transformers(found, folder)


class ChatTemplate:
    """Makes the text of a conversation, as transformers does. Importing transformers takes seconds, so this waits for
    the first conversation."""

    def __init__(self, folder: str | Path, file: str = ""):
        """folder: of the tokenizer, whose template is used unless `file` holds another one. Raises UserError."""
        self.folder, self.file = Path(folder), file
        self._tokenizer: Any = None
        self._template: str | None = None
        if file:  # read even if no prompt turns out to be a conversation: a misspelt name must not go unnoticed
            try:
                self._template = Path(file).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"data.chat_template={file} can't be read: {error}") from None

    def render(self, where: str, messages: list[dict[str, str]], *, answers: bool = True) -> str:
        """The text of a conversation, and behind it, with `answers`, the beginning of the assistant's answer. where:
        file and place. Raises UserError."""
        if self._tokenizer is None:
            self._load(where)
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answers, chat_template=self._template
            )
        except Exception as error:  # templates raise exceptions of their own for roles that they do not know
            raise UserError(f"{where}: the chat template does not take this conversation: {error}") from None

    def _load(self, where: str) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        if not self.file and not tokenizer.chat_template:
            raise UserError(
                f"{where}: the prompt is a list of messages, and the tokenizer in {self.folder} has no chat template; "
                "give data.chat_template=FILE, or write the prompts as text"
            )
        self._tokenizer = tokenizer


def convert_gguf(gguf_file: str | Path, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Converts a GGUF file of a supported family into a Hugging Face folder, dequantised, with its tokenizer.

    Raises UserError if the packages gguf and accelerate are missing or the file cannot be read.
    """
    gguf_file, folder = Path(gguf_file), Path(folder)
    if not gguf_file.is_file():
        raise UserError(f"{gguf_file} is missing; give a GGUF file")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"reading GGUF files needs two more packages ({error}): pip install gguf accelerate") from None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        where: dict[str, Any] = {"gguf_file": gguf_file.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, dtype=dtype, trust_remote_code=False, **where)
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, trust_remote_code=False, **where)
    except Exception as error:  # whatever transformers raises, the cause is the file
        raise UserError(f"{gguf_file}: transformers cannot read this GGUF file ({error})") from None
    with naming(gguf_file):
        config = model_config.from_hf(model.config.to_dict() | {"quantization_config": None})  # dequantised by now
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    if config.tie_embeddings:
        state.pop("lm_head.weight", None)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    values = read_json(folder / "tokenizer_config.json")
    own = {key: value for key, value in values.items() if key not in ("is_local", "local_files_only")}
    weights.write_json(folder / "tokenizer_config.json", own)
    save_state(state, config, "lm", folder)


def _to_hf_name(name: str) -> str:
    return name if name in _HEADS else "model." + name


def _check_names(
    folder: Path, config: ModelConfig, head: Head, places: dict[str, Path], shapes: dict[str, torch.Size]
) -> list[str]:
    """Compares the stored tensors (`places`) with those the model needs -> the heads that start at zero."""
    file = _file(folder)
    if head == "lm" and "score.weight" in places:
        raise UserError(
            f"{file} holds a critic or reward model (tensor score.weight), not a language model; give a folder saved "
            "from AutoModelForCausalLM"
        )
    embeddings = "model.embed_tokens.weight"
    if config.tie_embeddings and embeddings not in places and "lm_head.weight" in places:
        raise UserError(
            f"{file} holds lm_head.weight but lacks tensor {embeddings}; load and save it with transformers once"
        )
    fresh = ["score.weight"] if head == "scalar" and "score.weight" not in places else []
    missing = [name for name in shapes if name not in places and name not in fresh]
    if missing:
        raise UserError(
            f"{file} lacks tensor {missing[0]}{_more(missing)}, which config.json requires; copy all weights, or the "
            "config.json that belongs to them"
        )
    ignored = {"lm_head.weight"} if head == "scalar" or config.tie_embeddings else set()
    extra = [name for name in places if name not in shapes and name not in ignored and not _TABLES.search(name)]
    if extra:
        raise UserError(
            f"{file} holds tensor {extra[0]}{_more(extra)}, which the model in config.json does not have; the two "
            "files do not belong together"
        )
    return fresh


def _file(folder: Path) -> Path:
    """The file that names the tensors of a folder."""
    return folder / (weights.SINGLE if (folder / weights.SINGLE).exists() else weights.INDEX)


def _check_tied(
    config: ModelConfig,
    places: dict[str, Path],
    shapes: dict[str, torch.Size],
    tensors: dict[str, Tensor],
    parts: dict[str, tuple[slice, ...]],
) -> None:
    """Checks, on stages that hold them, that a stored copy of tied weights equals the original."""
    name = "model.embed_tokens.weight"
    if not config.tie_embeddings or "lm_head.weight" not in places or name not in tensors:
        return
    embeddings = tensors[name]
    expect, part = {"lm_head.weight": shapes[name]}, {"lm_head.weight": parts[name]}
    copy = weights.read_weights(places, expect, lambda tensor: tensor.to(embeddings), part)
    if not torch.equal(copy["lm_head.weight"], embeddings):
        raise UserError(
            f"{places['lm_head.weight']}: tensor lm_head.weight differs from model.embed_tokens.weight, but "
            'config.json ties them; set "tie_word_embeddings" to false there'
        )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _copy(source: Path, folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = source / name
        if path.is_file() and path.resolve() != (folder / name).resolve():
            shutil.copyfile(path, folder / name)
