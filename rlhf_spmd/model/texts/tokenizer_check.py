"""Whether transformers reads a tokenizer as this program does; asked once for each tokenizer, and remembered.

Importing transformers takes seconds, so what was found about files with a given hash is kept in the user's cache
folder, `$XDG_CACHE_HOME/rlhf_spmd/tokenizers/` or `~/.cache/rlhf_spmd/tokenizers/`. This file imports neither torch nor
transformers until it must.
"""

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.user_cache import keep, recall
from rlhf_spmd.model.texts.tokenizer_files import BACKEND, CONFIG, files_hash

if TYPE_CHECKING:
    from rlhf_spmd.model.texts.tokenizer import Tokenizer

RULES = 1  # to be raised when more is compared than before
EMBEDDED = Path(__file__).parents[2] / "embedded"
TEXTS = (
    "Hello world",
    " It's 1,234.50!",
    "two  spaces\n\n\tand a tab, then\r\nlines ",
    "def f(x):\n    return {'a': x[0] ** 2}",
    "naïve café – 数学 Привет 🙂",
)


def reading_note(folder: str | Path) -> str:
    """Returns what the user should know about how transformers reads the tokenizer in a folder; empty: nothing. Without
    tokenizer.json transformers is the only reader. Raises UserError if it makes other tokens of a text."""
    folder = Path(folder)
    if not (folder / BACKEND).is_file():
        return ""
    digest = files_hash(folder)
    if digest in {files_hash(path.parent) for path in EMBEDDED.glob(f"*/*/{BACKEND}")}:  # which tests compare
        return ""
    versions = [version(package) for package in ("transformers", "tokenizers")]
    name = hashlib.sha256(repr([RULES, digest, *versions]).encode()).hexdigest()
    note = recall("tokenizers", name, _note)
    if note is None:
        note = _compared(folder)
        keep("tokenizers", name, {"note": note}, _note)
    return note


# ---- what is remembered ---------------------------------------------------------------------------------------------


def _note(values: Any) -> str | None:
    note = values.get("note") if isinstance(values, dict) else None
    return note if isinstance(note, str) else None


# ---- comparing ------------------------------------------------------------------------------------------------------


def _compared(folder: Path) -> str:
    """Compares two readings of a folder and returns the note about it. Raises UserError."""
    from rlhf_spmd.model.hf import load_tokenizer, transformers_tokenizer

    ours = load_tokenizer(folder)
    try:
        theirs = transformers_tokenizer(folder)
    except UserError as error:
        return f"{error}; whether it makes other tokens than this program is not known"
    found, unnamed = _difference(ours, theirs), _unnamed(folder, ours, theirs)
    if not found:
        return unnamed
    if other := _difference(ours, transformers_tokenizer(folder, generic=True)):
        raise UserError(
            f"{folder}: {other}, so a model would be trained on other tokens than it is used with; write the files "
            "anew by AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), or correct them"
        )
    known = (
        f"{folder}: {found}: its class for this model does not do what {BACKEND} says. This program does, as does "
        "PreTrainedTokenizerFast of transformers; see the section Models of docs/data_and_rewards.md"
    )
    return f"{known}. {unnamed}" if unnamed else known


def _difference(ours: "Tokenizer", theirs: "Tokenizer") -> str:
    """Returns the first difference between two readings of a folder; empty: there is none."""
    for name in ("bos", "eos"):
        mine, other = (getattr(one, f"{name}_token_id") for one in (ours, theirs))
        if mine is not None and mine != other:
            return f"the id of {name}_token is {mine} by its files, and {other} in transformers"
    for text in _texts(*ours.added, *theirs.added):
        mine, other = _ids(ours, text), _ids(theirs, text)
        if mine != other:
            return f"{BACKEND} makes the tokens {mine} of the text {text[0]!r}, and transformers {other}"
    return ""


def _texts(*added: str) -> list[tuple[str, bool]]:
    """Returns texts to compare, and whether with what the tokenizer adds. added: texts of added tokens."""
    around = [text for token in dict.fromkeys(added) for text in (token, f"a{token}b {token} c\n{token}\n")]
    return [(text, special) for special in (False, True) for text in TEXTS] + [(text, False) for text in around]


def _ids(tokenizer: "Tokenizer", text: tuple[str, bool]) -> list[int]:
    return tokenizer.encode(text[0], special=text[1])


def _unnamed(folder: Path, ours: "Tokenizer", theirs: "Tokenizer") -> str:
    """Returns a note about ends that only transformers knows, by the class of the tokenizer."""
    names = [name for name in ("bos", "eos") if getattr(ours, f"{name}_token_id") is None]
    known = [name for name in names if getattr(theirs, f"{name}_token_id") is not None]
    if not known:
        return ""
    ids = ", ".join(f"{name}_token is {getattr(theirs, f'{name}_token_id')}" for name in known)
    return f"{folder / CONFIG} does not name what transformers assumes: {ids}; name it there if it is meant"
