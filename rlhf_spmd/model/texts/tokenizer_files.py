"""The files of a tokenizer, read without torch: added tokens, special names, and what tells two tokenizers apart.

Which file counts is as in transformers. The tokens that tokenizer_config.json lists (`added_tokens_decoder`) are added
to those of tokenizer.json. If it lists none, those of added_tokens.json are, and the names in special_tokens_map.json
replace those in tokenizer_config.json. Names of special tokens (`eos_token`, ...) make tokens special, or new ones.
The package `tokenizers` reads tokenizer.json; where the other files change what it says, transformers does (hf.py).
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import paths_in, read_bytes
from rlhf_spmd.model.config import read_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
BACKEND, CONFIG, NAMES, ADDED = TOKENIZER_FILES[:4]
VOCABULARIES, TEMPLATE = TOKENIZER_FILES[4:7], TOKENIZER_FILES[7]
GENERATION = "generation_config.json"
NAMED_TEMPLATES, OF_TOOLS = "additional_chat_templates", "tool_use"  # which conversations with tools are written by
LISTED = "added_tokens_decoder"
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
OF_CLASS = ("tokenizer_class", "add_bos_token", "add_eos_token", "add_prefix_space", "legacy")  # without tokenizer.json


@dataclass(frozen=True, slots=True)
class Texts:
    """What belongs to a model beside its weights, as it was trained.

    source: the folder with the files of its tokenizer; empty: they are in place.
    generation: the folder with its generation_config.json, if there is one; empty: `source`.
    chat_template: what stood in the place of the tokenizer's own; empty: nothing did.
    ends: the tokens that ended responses; empty: those of its configuration.
    stop: the texts that ended them.
    suppressed: tokens that were never drawn.
    """

    source: str | Path = ""
    generation: str | Path = ""
    chat_template: str = ""
    ends: Sequence[int] = ()
    stop: Sequence[str] = ()
    suppressed: Sequence[int] = ()


def tokenizer_files(folder: Path) -> list[str]:
    """Returns the names of the files that a tokenizer is read from, those that are there; chat templates with a name of
    their own come last."""
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()] + named_templates(folder)


def named_templates(folder: Path) -> list[str]:
    """Returns the names of the files with chat templates that have a name of their own, such as tool_use."""
    paths = paths_in(folder / NAMED_TEMPLATES, "*.jinja")
    return [f"{NAMED_TEMPLATES}/{path.name}" for path in paths if path.is_file()]


def read_template(file: str | Path) -> str:
    """Reads data.chat_template. Raises UserError."""
    try:
        return read_bytes(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template={file} can't be read: {error}") from None


def special_names(folder: Path) -> dict[str, str]:
    """Returns the text of each kind of special token ("eos_token", ...)."""
    return {kind: _text(token) for kind, token in _named(_settings(folder)).items()}


def has_chat_template(folder: Path) -> bool:
    return (folder / TEMPLATE).is_file() or bool(_read(folder / CONFIG).get("chat_template"))


def no_chat_template(where: str, folder: str | Path) -> UserError:
    """Returns the error for a row that is a list of messages, if the tokenizer in the folder has no chat template."""
    return UserError(
        f"{where}: the prompt is a list of messages, and the tokenizer in {folder} has no chat template; "
        "give data.chat_template=FILE, or write the prompts as text"
    )


def read_backend(folder: Path) -> Any:
    """Reads tokenizer.json with the package `tokenizers`. Raises UserError if it cannot be read."""
    from tokenizers import Tokenizer

    path = folder / BACKEND
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exceptions
        raise UserError(f"{path} is not a tokenizer ({error}); copy it again") from None
    backend.no_padding()
    backend.no_truncation()
    return backend


def changed_tokens(folder: Path, backend: Any) -> set[str]:
    """Returns the tokens that the other files add to those of tokenizer.json, or give other flags."""
    settings, changed = _settings(folder), set[str]()
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text, (_, flags) in listed_tokens(folder).items():
        if text not in known or any(flags[flag] != getattr(known[text], flag) for flag in FLAGS if flag in flags):
            changed.add(text)
    for token in (*_named(settings).values(), *_without_name(settings)):
        text = _text(token)
        if text not in known or not known[text].special:
            changed.add(text)
    return changed


def listed_tokens(folder: Path) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """Returns id and flags of the tokens that tokenizer_config.json or added_tokens.json lists, by text. Raises
    UserError."""
    settings = _settings(folder)
    path = folder / (CONFIG if LISTED in settings else ADDED)
    try:
        if LISTED in settings:
            return {token["content"]: (int(number), token) for number, token in settings[LISTED].items()}
        return {text: (int(number), {}) for text, number in _read(path).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not list added tokens with their ids ({error!r}); copy it again") from None


def check_ids(folder: Path, backend: Any) -> None:
    """Raises UserError if the files give a token different ids."""
    for text, (number, _) in listed_tokens(folder).items():
        if (other := backend.token_to_id(text)) != number:
            file = CONFIG if LISTED in _settings(folder) else ADDED
            raise UserError(
                f"{folder / file} gives the token {text!r} the id {number}, but with {BACKEND} it is {other}; correct "
                "the file that does not fit the model's embeddings"
            )


# ---- names ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _settings(folder: Path) -> dict[str, Any]:
    values, more = _read(folder / CONFIG), ("extra_special_tokens", "additional_special_tokens")
    own = {name: values[name] for name in more if values.get(name)}
    names = _read(folder / NAMES)
    # transformers calls the list of the config by its newer name before it reads the other file
    names = {name: token for name, token in names.items() if name not in more} if own else names
    return values if LISTED in values else values | names


def _text(token: Any) -> str:
    """Returns the text of a token that is given as text, or as an object with its flags; empty for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the special tokens with a name of their own, by kind."""
    more = settings.get("extra_special_tokens")
    named = {kind: token for kind, token in settings.items() if kind.endswith("_token")}
    return {kind: token for kind, token in (named | (more if isinstance(more, dict) else {})).items() if _text(token)}


def _without_name(settings: Mapping[str, Any]) -> list[Any]:
    """Returns the other special tokens."""
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    return [token for token in more if _text(token)] if isinstance(more, list) else []


# ---- what tells two tokenizers apart --------------------------------------------------------------------------------


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (BACKEND, *VOCABULARIES))


def same_behaviour(one: Path, other: Path) -> bool:
    """Returns whether two folders hold tokenizers that do the same: tokens and ids, flags of added tokens, and how
    texts become tokens and tokens texts. How the files are written, chat templates and the names of special tokens do
    not count. Raises UserError for a tokenizer that cannot be read."""
    if not (has_tokenizer(one) and has_tokenizer(other)):
        return False
    if one.resolve() == other.resolve():
        return True
    return _behaviour(str(one), _stamp(one)) == _behaviour(str(other), _stamp(other))


def _stamp(folder: Path) -> tuple:
    """Changes with the files of a tokenizer."""
    states = [(name, (folder / name).stat()) for name in tokenizer_files(folder)]
    return tuple((name, state.st_mtime_ns, state.st_size, state.st_ino) for name, state in states)


@functools.lru_cache(maxsize=64)
def _behaviour(folder: str, stamp: tuple) -> str:
    """Returns a hash of what the tokenizer does."""
    path = Path(folder)
    listed = listed_tokens(path)
    if (path / BACKEND).is_file():
        backend = read_backend(path)
        changed, known = changed_tokens(path, backend), backend.get_vocab()
        added = [(text, listed.get(text)) for text in sorted(changed) if text in listed or text not in known]
        about = _of_backend(backend) | {"added": added}
    else:
        settings = _settings(path)
        files = {
            name: hashlib.sha256((path / name).read_bytes()).hexdigest()
            for name in VOCABULARIES
            if (path / name).is_file()
        }
        about = {key: settings.get(key) for key in OF_CLASS} | {"listed": listed} | files
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _of_backend(backend: Any) -> dict[str, Any]:
    """Returns what a tokenizer does, whatever version of its package wrote it."""
    values = json.loads(backend.to_str())
    for key in ("version", "truncation", "padding"):
        values.pop(key, None)
    values["added_tokens"] = sorted(values["added_tokens"], key=lambda token: token["id"])
    if isinstance(values["model"]["vocab"], dict):  # else a list, whose order are the ids
        values["model"]["vocab"] = backend.get_vocab(with_added_tokens=True)
    if (values["decoder"] or {}).get("type") == "ByteLevel":
        values["decoder"] = "ByteLevel"  # its options are for the pre-tokenizer of this name
    values["post_processor"] = [backend.encode("a", add_special_tokens=special).ids for special in (False, True)]
    return values | {"pre_tokenizer": _without_offsets(values["pre_tokenizer"])}


def _without_offsets(values: Any) -> Any:
    """Removes what only changes where tokens are in the text."""
    if isinstance(values, dict):
        return {key: _without_offsets(value) for key, value in values.items() if key != "trim_offsets"}
    return [_without_offsets(value) for value in values] if isinstance(values, list) else values
