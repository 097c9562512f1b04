"""The files of a tokenizer, read without torch: added tokens, special names, and what tells two tokenizers apart.

Which file counts is as in transformers. The tokens that tokenizer_config.json lists (`added_tokens_decoder`) are added
to those of tokenizer.json. If it lists none, those of added_tokens.json are, and the names in special_tokens_map.json
replace those in tokenizer_config.json. Names of special tokens (`eos_token`, ...) make tokens special, or new ones.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
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
Flags = dict[str, bool]


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


def read_backend(folder: Path, *, named: bool = True) -> Any:
    """Reads tokenizer.json with the package `tokenizers`, with the added tokens that the other files list and, if
    `named`, those that they name. Raises UserError if it cannot be read, or if the files give a token different ids."""
    from tokenizers import AddedToken, Tokenizer

    path = folder / BACKEND
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exceptions
        raise UserError(f"{path} is not a tokenizer ({error}); copy it again") from None
    backend.no_padding()
    backend.no_truncation()
    own = {token.content: _flags_of(token) for token in backend.get_added_tokens_decoder().values()}
    listed = _listed(folder, own)
    tokens = {text: flags for text, (_, flags) in listed.items()}
    tokens |= _by_name(folder, own, tokens) if named else {}
    backend.add_tokens([AddedToken(text, **flags) for text, flags in tokens.items() if flags != own.get(text)])
    for text, (number, _) in listed.items():
        if (found := backend.token_to_id(text)) != number:
            file = CONFIG if LISTED in _settings(folder) else ADDED
            raise UserError(
                f"{folder / file} gives the token {text!r} the id {number}, but with {BACKEND} it is {found}; correct "
                "the file that does not fit the model's embeddings"
            )
    return backend


def same_behaviour(one: Path, other: Path) -> bool:
    """Returns whether two folders hold tokenizers that do the same: tokens and ids, flags of added tokens, and how
    texts become tokens and tokens texts. How the files are written, chat templates and the names of special tokens
    (`eos_token`) do not count, as they change no token. False for a folder without a tokenizer."""
    if not (has_tokenizer(one) and has_tokenizer(other)):
        return False
    if one.resolve() == other.resolve() or _hash(one) == _hash(other):
        return True
    return _behaviour(str(one), _stamp(one)) == _behaviour(str(other), _stamp(other))


def files_hash(folder: Path) -> str:
    """Returns the SHA-256 of everything that a tokenizer is read from."""
    digest = hashlib.sha256()
    for name in tokenizer_files(folder):
        content = (folder / name).read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    about = _read(folder / "config.json")  # transformers chooses a class by them
    digest.update(repr([about.get(key) for key in ("model_type", "tokenizer_class")]).encode())
    return digest.hexdigest()


# ---- names and listed tokens ----------------------------------------------------------------------------------------


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
    found = {kind: token for kind, token in settings.items() if kind.endswith("_token")}
    return {kind: token for kind, token in (found | (more if isinstance(more, dict) else {})).items() if _text(token)}


def _without_name(settings: Mapping[str, Any]) -> list[Any]:
    """Returns the other special tokens."""
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    return [token for token in more if _text(token)] if isinstance(more, list) else []


def _flags(token: Any, *, special: bool) -> Flags:
    """Returns the flags of a token.

    special: where the token does not say.
    """
    given = token if isinstance(token, dict) else {}
    special = bool(given.get("special", special))
    return {flag: bool(given.get(flag, not special if flag == "normalized" else False)) for flag in FLAGS} | {
        "special": special
    }


def _flags_of(token: Any) -> Flags:
    return {flag: getattr(token, flag) for flag in FLAGS}


def _listed(folder: Path, own: Mapping[str, Flags]) -> dict[str, tuple[int, Flags]]:
    """Returns id and flags of the tokens that tokenizer_config.json or added_tokens.json lists by id, by text. Raises
    UserError.

    own: flags of the tokens of tokenizer.json.
    """
    settings = _settings(folder)
    names = set(map(_text, _named(settings).values()))
    found: list[tuple[int, str, Flags]] = []
    if LISTED in settings:
        for key, token in _items(folder / CONFIG, settings[LISTED]):
            if not (key.isdecimal() and _text(token)):
                raise UserError(
                    f"{folder / CONFIG}: {LISTED} has {key!r}: {token!r}, not an id with a token; copy it again"
                )
            flags = _flags(token, special=False)
            found.append((int(key), _text(token), flags | {"special": flags["special"] or _text(token) in names}))
    else:
        names.update(map(_text, _without_name(settings)))
        for text, number in _items(folder / ADDED, _read(folder / ADDED)):
            if not isinstance(number, int) or isinstance(number, bool):
                raise UserError(f"{folder / ADDED} has {text!r}: {number!r}, not a token with its id; copy it again")
            found.append((number, text, own.get(text) or _flags({}, special=text in names)))
    return {text: (number, flags) for number, text, flags in sorted(found, key=lambda one: one[0])}


def _items(path: Path, values: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict):
        raise UserError(f"{path} has no object of added tokens ({values!r}); copy the file again")
    yield from values.items()


def _by_name(folder: Path, own: Mapping[str, Flags], listed: Mapping[str, Flags]) -> dict[str, Flags]:
    """Returns the flags of the tokens that are special only because a file names them, by text."""
    settings, found = _settings(folder), {}
    for token in _named(settings).values():
        text = _text(token)
        known = listed.get(text) or own.get(text)
        if known is None:
            found[text] = _flags(token, special=True) | {"special": True}
        elif LISTED not in settings:
            found[text] = known | {"special": True}
    for token in _without_name(settings):
        if _text(token) not in (*own, *listed, *found):
            found[_text(token)] = _flags(token, special=True)
    return found


# ---- what tells two tokenizers apart --------------------------------------------------------------------------------


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (BACKEND, *VOCABULARIES))


def _stamp(folder: Path) -> tuple:
    """Changes with the files of a tokenizer."""
    paths = [folder / name for name in (*tokenizer_files(folder), "config.json")]
    states = [(path.name, path.stat()) for path in paths if path.is_file()]
    return tuple((name, state.st_mtime_ns, state.st_size, state.st_ino) for name, state in states)


def _hash(folder: Path) -> str:
    return _hash_at(str(folder), _stamp(folder))


@functools.lru_cache(maxsize=64)
def _hash_at(folder: str, stamp: tuple) -> str:
    return files_hash(Path(folder))


@functools.lru_cache(maxsize=64)
def _behaviour(folder: str, stamp: tuple) -> str:
    """Returns a hash of what the tokenizer does."""
    path = Path(folder)
    about = _of_vocabularies(path)
    if (path / BACKEND).is_file():  # a name may make a new token, but does not make another one of an old token
        about = _of_backend(read_backend(path, named=False)) | {"ids": read_backend(path).get_vocab()}
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _of_backend(backend: Any) -> dict[str, Any]:
    """Returns what a tokenizer does, whatever version of its package wrote it."""
    values = json.loads(backend.to_str())
    for key in ("version", "truncation", "padding", "post_processor"):
        values.pop(key, None)
    values["added_tokens"] = sorted(values["added_tokens"], key=lambda token: token["id"])
    if isinstance(values["model"]["vocab"], dict):  # else a list, whose order are the ids
        values["model"]["vocab"] = backend.get_vocab(with_added_tokens=True)
    if (values["decoder"] or {}).get("type") == "ByteLevel":
        values["decoder"] = "ByteLevel"  # its options are for the pre-tokenizer of this name
    processed = [backend.encode("a", add_special_tokens=special).ids for special in (False, True)]
    parts = {key: value if key == "model" else _without_offsets(value) for key, value in values.items()}
    return parts | {"post_processor": processed}


def _without_offsets(values: Any) -> Any:
    """Removes what only changes where tokens are in the text."""
    if isinstance(values, dict):
        return {key: _without_offsets(value) for key, value in values.items() if key != "trim_offsets"}
    return [_without_offsets(value) for value in values] if isinstance(values, list) else values


def _of_vocabularies(folder: Path) -> dict[str, Any]:
    """Returns what is known of a tokenizer without tokenizer.json."""
    settings = _settings(folder)
    found = {key: settings.get(key) for key in OF_CLASS} | {"listed": _listed(folder, {})}
    found["tokenizer_class"] = str(settings.get("tokenizer_class")).removesuffix("Fast")
    for name in VOCABULARIES:
        if (folder / name).is_file():
            is_json = name.endswith(".json")
            content = None if is_json else hashlib.sha256((folder / name).read_bytes()).hexdigest()
            found[name] = read_json(folder / name) if is_json else content
    return found
