"""Finds and opens the files of a data set: a folder or a pattern stands for its files, in the order of their names.

A name says what a file holds: .jsonl, .json, .csv, .parquet, .arrow or .txt. Files of text may be compressed
(.jsonl.gz). Of a folder that the library datasets saved, the files are read that it names.
"""

import gzip
import json
import zlib
from collections.abc import Sequence
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file, is_folder, paths_in, why_no_file

CSV, PARQUET, ARROW, PACKED = ".csv", ".parquet", ".arrow", ".gz"
TEXT_KINDS = (".jsonl", ".json", CSV, ".txt")
TABLES = (PARQUET, ARROW)
KINDS = (*TEXT_KINDS, *TABLES)
STATE, SPLITS = "state.json", "dataset_dict.json"  # of save_to_disk()
ABOUT = (STATE, SPLITS, "dataset_info.json", "dataset_infos.json")  # files beside data that say what it is
WILD = "*?["  # characters of patterns
KNOWN = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"


def kind_of_file(path: Path) -> str:
    """Returns what a file holds, by its name: one of KINDS, or another ending."""
    return Path(path.stem).suffix.lower() if is_packed(path) else path.suffix.lower()


def is_packed(path: Path) -> bool:
    """Returns whether a file is compressed, by its name."""
    return path.suffix.lower() == PACKED


def stem_of(path: Path) -> str:
    """Returns the name of a file without its endings."""
    return Path(path.stem).stem if is_packed(path) and kind_of_file(path) in KINDS else path.stem


def named_parts(text: str) -> list[str]:
    """Returns the files, folders and patterns that an option names. A comma may be a part of the name of a single
    one."""
    if text and (is_file(text) or is_folder(text)):  # the empty text is a path, that of the working folder
        return [text]
    return [part.strip() for part in text.split(",") if part.strip()]


def files_of(part: str | Path) -> list[Path]:
    """Returns the files that a name, a folder or a pattern stands for, sorted by their names; a name that stands for
    nothing stays, so that who opens it says why. Raises UserError for a folder or a pattern without files."""
    path, text = Path(part), str(part)
    if is_folder(path):
        if splits := _listed(path / SPLITS, "splits"):
            raise UserError(f"the folder {path} holds several data sets: name one, such as {path / str(splits[0])}")
        if parts := _listed(path / STATE, "_data_files"):
            return [path / str(part["filename"]) for part in parts if "filename" in part]
        files = [file for file in paths_in(path, "[!._]*") if _is_data(file)]
        if not files:
            raise UserError(f"the folder {path} has no data: put files of the kinds {KNOWN} into it, or name one")
        return files
    if not any(char in text for char in WILD) or not why_no_file(path):
        return [path]
    try:
        matching = sorted(map(Path, glob(text, recursive=True)))
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(f"{text} is not a pattern of files ({error}): write one such as data/*.jsonl") from None
    files = [file for file in matching if not is_folder(file) and file.name not in ABOUT]
    if not files:
        raise UserError(f"no file matches {text} (looked in {Path.cwd()}): change the pattern, or name a file")
    return files


def every_file(parts: Sequence[str]) -> list[Path]:
    """Returns the files of several names, folders and patterns."""
    return [path for part in parts for path in files_of(part)]


def read_data(path: Path, most: int | None = None) -> bytes:
    """Returns the content of a file of text, decompressed. most: only so many lines, the first ones. Raises OSError,
    and UserError for a file that cannot be decompressed."""
    if most is None and not is_packed(path):
        return path.read_bytes()
    try:
        with gzip.GzipFile(path) if is_packed(path) else path.open("rb") as file:
            return file.read() if most is None else b"".join(islice(file, most))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is not a whole file of gzip ({error}): compress it again, or name another") from None


def _is_data(path: Path) -> bool:
    """Returns whether a file of a folder belongs to its data."""
    kinds = TEXT_KINDS if is_packed(path) else KINDS
    return kind_of_file(path) in kinds and path.name not in ABOUT and not is_folder(path)


def _listed(path: Path, key: str) -> list[Any]:
    """Returns a list of a JSON file, if it is there and has one."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    listed = values.get(key) if isinstance(values, dict) else None
    return listed if isinstance(listed, list) else []
