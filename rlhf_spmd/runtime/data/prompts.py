"""Prompts: read from a file, checked line by line, tokenised, and used in an order independent of the number of ranks.

First runs fail most often because of a bad prompt file, so every error names the file, the line and the fix.
"""

# B prompts in a batch, P prompt tokens (padded)

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Required, Unpack

import numpy as np

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import TABLES, files_of, kind_of_file, stem_of
from rlhf_spmd.files.reading import is_file, is_folder
from rlhf_spmd.plan.runtime_words import PROMPTS
from rlhf_spmd.runtime.data.packed_rows import PADDING, NumberRows, PackedRows, TextRows, TokenRows
from rlhf_spmd.runtime.data.prompt_order import PromptOrder
from rlhf_spmd.runtime.data.readers import (
    CONVERSATIONS,
    INSTEAD,
    SOURCE,
    SYSTEMS,
    TEXT,
    Record,
    number_of,
    read_records,
    without_nulls,
)
from rlhf_spmd.runtime.data.row_tokens import Check, Reading, Render, RowOptions, check_form, read_row
from rlhf_spmd.runtime.data.template_arguments import KWARGS, TOOLS

if TYPE_CHECKING:
    import torch

    from rlhf_spmd.model.texts.tokenizer import Tokenizer

NumberColumn = tuple[str, float | None]  # a column with numbers, and that of rows without one (None: an error)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Tokenised prompts and the seeded order in which the iterations use them.

    `texts[i]` is what `prompts[i]` says, after a truncation too: the reward function reads what the model read.
    """

    prompts: TokenRows
    texts: TextRows
    seed: int = 0
    source: str = "prompts"  # file name, for messages
    num_truncated: int = 0
    num_dropped: int = 0
    responses: Mapping[str, TokenRows] = field(default_factory=dict)  # by key, where the set has some for each prompt
    columns: TextRows | None = None  # all other columns, a JSON object for each prompt; None: there are none
    sizes: tuple[int, ...] = ()  # number of prompts of each file; (): there is one
    weights: tuple[float, ...] = ()  # of the files (prompt_order.py); (): they are one set
    shuffle: bool = True  # epochs are permutations; else the order of the files
    numbers: Mapping[str, NumberRows] = field(default_factory=dict)  # by key, of rows or of the tokens of a response
    num_cut: int = 0  # rows with a response that was cut
    num_silent: int = 0  # rows that were left out, because nothing in them is learned
    column_names: tuple[str, ...] = ()  # of the other columns of all rows together
    remarks: tuple[str, ...] = ()  # for the heading: what is odd about the rows
    written_at: str = ""  # the time that the chat template wrote (template_time.py); empty: it wrote none
    _order: PromptOrder = field(init=False, repr=False, compare=False)
    _hashes: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.prompts) and len(self.prompts) == len(self.texts), (
            "a prompt set needs prompts and a text for each"
        )
        sizes = self.sizes or (len(self.prompts),)
        assert sum(sizes) == len(self.prompts), (sizes, len(self.prompts))
        object.__setattr__(self, "_order", PromptOrder(sizes, self.weights, self.seed, self.shuffle))

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, key: str) -> TokenRows:
        """Returns the tokens of a key that the data set has."""
        return self.prompts if key == PROMPTS else self.responses[key]

    def padded(self, key: str, index_B: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the data that some rows have of a key, [B, *shape]: tokens, padded with -1, or numbers, padded with
        0."""
        rows = self.numbers[key] if key in self.numbers else self.rows(key)
        return rows.padded(index_B, shape)

    def records(self, index_B: Sequence[int]) -> list[Record]:
        """Returns the other columns of these prompts, each with those that its row has."""
        return [{} if self.columns is None else json.loads(self.columns[int(index)]) for index in index_B]

    def whole_records(self, index_B: Sequence[int]) -> list[Record]:
        """Returns `records` with the columns of all rows: None where a row has none."""
        return [dict.fromkeys(self.column_names) | record for record in self.records(index_B)]

    def batch(self, iteration: int, rollout_batch: int) -> list[int]:
        """Returns the indices of the prompts of one iteration (from 0): a pure function of (seed, iteration)."""
        return self._order.batch(iteration, rollout_batch)

    def tokens_fingerprint(self) -> str:
        """Returns a hash of all tokens, in the order of the files."""
        return self._hash_of("rows", "", [self.prompts, *self.responses.values()])

    def fingerprint(self) -> str:
        """Returns a hash of the seed, of what else their order depends on, and of all prompts (length, then tokens),
        responses and numbers."""
        order = f" {self.sizes} {self.weights} {self.shuffle}" if self.weights or not self.shuffle else ""
        rows = [self.prompts, *self.responses.values(), *self.numbers.values()]
        return self._hash_of("tokens", f"{self.seed} {len(self)}{order}", rows)

    def columns_fingerprint(self) -> str:
        """Returns a hash of the other columns, which reward functions and metrics read."""
        return self._hash_of("columns", "", [] if self.columns is None else [self.columns])

    def _hash_of(self, name: str, text: str, parts: Sequence[PackedRows]) -> str:
        """Returns a hash of a text and of rows, computed once."""
        if name not in self._hashes:
            digest = hashlib.sha256(text.encode())
            for rows in parts:
                rows.add_to(digest)
            self._hashes[name] = digest.hexdigest()
        return self._hashes[name]

    def fingerprints(self, file: str) -> dict[str, str]:
        """Returns what ranks and checkpoints compare, by name.

        file: name of the set in these names.
        """
        return {
            f"prompts in {file}": self.fingerprint(),
            f"columns of the prompts in {file}": self.columns_fingerprint(),
        }


def pad(prompts: Iterable[Sequence[int]], width: int | None = None) -> torch.Tensor:
    """Returns prompts_BP int64, padded on the right with -1 to `width` (default: the longest prompt)."""
    import torch

    rows = [list(prompt) for prompt in prompts]
    longest = max(map(len, rows), default=0)
    width = longest if width is None else width
    assert longest <= width, f"a prompt of {longest} tokens does not fit {width}"
    padded = [row + [PADDING] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64).view(len(rows), width)


@dataclass(slots=True)
class _Rows:
    """The prompts of one or more files."""

    tokens: array = field(default_factory=lambda: array("i"))  # nine times smaller than lists
    ends: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    columns: Mapping[str, NumberColumn] = field(default_factory=dict)  # by key
    marks: str = ""  # the key of the marks of responses; empty: there are none
    numbers: dict[str, list[Sequence[float]]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)  # other columns
    names: dict[str, None] = field(default_factory=dict)  # of all of them
    form: dict[str, str] = field(default_factory=dict)  # how rows are written -> the place of the first such row
    num_truncated: int = 0  # prompts
    num_cut: int = 0  # responses
    num_dropped: int = 0
    num_silent: int = 0
    remarks: Counter[str] = field(default_factory=Counter)  # -> number of rows


class SetOptions(RowOptions, total=False):
    """The options of load_prompts besides the template."""

    max_prompt_tokens: Required[int]
    seed: int
    weights: Sequence[float]
    shuffle: bool
    numbers: Mapping[str, NumberColumn]
    marks: str


def load_prompts(
    path: str | Path | Sequence[str],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    seed: int = 0,
    weights: Sequence[float] = (),
    shuffle: bool = True,
    numbers: Mapping[str, NumberColumn] = MappingProxyType({}),
    marks: str = "",
    render: Render | None = None,
    check: Check | None = None,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    **rows: Unpack[RowOptions],
) -> PromptSet:
    """Reads files (files/data_files.py), folders or patterns of them, one or several: rows, or prompts of .txt, a line
    each and taken literally. Raises UserError naming file and line for anything it can't use.

    max_prompt_tokens: a longer prompt is an error, is cut to its last tokens (a beginning-of-sequence token stays), or
        is left out, as long_prompts says.
    seed, weights, shuffle: determine the order (prompt_order.py).
    numbers: columns with numbers, by key.
    marks: the key of which tokens of a response are learned.
    render: makes the text of a conversation, with template_kwargs and what a row has for the template
        (template_arguments.py).
    check: raises UserError for a conversation of which the template would lose something.
    rows: see RowOptions.

    The columns of responses are named by their keys (row_tokens.py). A response ends with an end of sequence; one of
    more than max_response_tokens tokens is an error, loses its last tokens, or its whole row is left out, as
    long_prompts says, too. A conversation in which the assistant says nothing is left out. Further columns are kept for
    reward functions; where several files are named, `data_source` is the name of the one that a row without such a
    column is from.
    """
    assert max_prompt_tokens > 0, max_prompt_tokens
    given: dict[str, Any] = {"render": render, "check": check, "template_kwargs": template_kwargs, **rows}
    reading = Reading(tokenizer, max_prompt_tokens, marks=bool(marks), **given)
    paths = [Path(one) for one in ([path] if isinstance(path, str | Path) else path)]
    read, sizes = _Rows(answers={name: [] for name in reading.columns}, columns=numbers, marks=marks), []
    read.numbers = {name: [] for name in (*numbers, *filter(None, [marks]))}
    for part, name in zip(paths, _names(paths), strict=True):
        before = len(read.texts)
        _read_files(read, part, reading, name)
        sizes.append(len(read.texts) - before)
    return PromptSet(
        TokenRows(np.frombuffer(read.tokens, np.int32), np.array(read.ends, dtype=np.int64)),
        TextRows.of(read.texts),
        seed,
        ",".join(map(str, paths)),
        read.num_truncated,
        read.num_dropped,
        {name: TokenRows.of(answers) for name, answers in read.answers.items()},
        TextRows.of(read.kept) if any(one != "{}" for one in read.kept) else None,
        sizes=tuple(sizes),
        weights=tuple(weights),
        shuffle=shuffle,
        numbers={name: NumberRows.of(values) for name, values in read.numbers.items()},
        num_cut=read.num_cut,
        num_silent=read.num_silent,
        column_names=tuple(read.names),
        remarks=(*(f"{num} {remark}" for remark, num in read.remarks.items()), *_unread(read, reading)),
    )


def _unread(rows: _Rows, reading: Reading) -> list[str]:
    """Returns a note about columns that nothing reads, of rows with responses; others are for reward functions."""
    read = {reading.key, *(column for column, _ in rows.columns.values())}
    read |= {*CONVERSATIONS, TEXT} if any(form.startswith("the column") for form in rows.form) else set()
    return unread(rows.names, read) if reading.columns else []


def unread(names: Iterable[str], read: Iterable[str]) -> list[str]:
    """Returns a note about columns that nothing reads, if there are some. read: those that something reads, beside
    those that are always read."""
    known = {TOOLS, KWARGS, *SYSTEMS, SOURCE, *read}
    others = [name for name in names if name not in known]
    return [f"nothing reads the columns {', '.join(others)}"] if others else []


def _names(parts: Sequence[Path]) -> list[str]:
    """Returns the name that each of several files, folders or patterns has in the column data_source: its name without
    the extension, or its path where two have one name. Nothing for a single one. Raises UserError for a file that is
    named twice."""
    if len(parts) == 1:
        return [""]
    seen: set[Path] = set()
    for path in (path for part in parts for path in files_of(part)):
        if path.resolve() in seen:
            raise UserError(f"data.prompts names {path} twice; name it once, with a larger weight in data.weights")
        seen.add(path.resolve())
    stems = [part.name if is_folder(part) else stem_of(part) if is_file(part) else str(part) for part in parts]
    return stems if len(set(stems)) == len(stems) else [str(part) for part in parts]


def _read_files(rows: _Rows, part: Path, reading: Reading, name: str) -> None:
    """Adds the rows of a file, or of all files of a folder or a pattern.

    name: for the column data_source of rows that have none; empty: no such column.
    """
    too_long: list[tuple[str, int]] = []
    num_before, num_silent, long_prompts = len(rows.texts), rows.num_silent, reading.long_prompts
    for path in files_of(part):
        _read_file(rows, path, reading, name, too_long)
    is_empty = len(rows.texts) == num_before
    if too_long and (long_prompts == "error" or is_empty):
        limit = reading.max_prompt_tokens
        raise UserError(_too_long_message(too_long, limit, dropped_all=long_prompts == "drop"))
    if is_empty and rows.num_silent > num_silent:
        raise UserError(f"{part}: no conversation has a message of the assistant to learn from: add the answers")
    if is_empty:
        left = "data.long_prompts=drop leaves no row: raise generation.max_new_tokens" if rows.num_dropped else ""
        raise UserError(f"{part}: {left}" if left else f"{part} is empty: it needs at least one prompt")
    if long_prompts == "truncate":
        rows.num_truncated += len(too_long)
    else:
        rows.num_dropped += len(too_long)


def _read_file(rows: _Rows, path: Path, reading: Reading, name: str, too_long: list[tuple[str, int]]) -> None:
    """Adds the rows of a file.

    too_long: receives place and tokens of each prompt that is too long.
    """
    long_prompts, is_arrow = reading.long_prompts, kind_of_file(path) in TABLES
    for place, record in read_records(path, reading.key, reading.others):
        where = f"{path}, {place}"
        row = read_row(
            where, {name: without_nulls(value) for name, value in record.items()} if is_arrow else record, reading
        )
        if row is None:
            rows.num_silent += 1
            continue
        check_form(row, where, rows.form)
        tokens, text, given = row.prompt, row.text, row.responses
        longest = max(map(len, given.values()), default=0)
        if longest > reading.max_response_tokens:
            if long_prompts == "error":
                raise UserError(
                    f"{where}: the response has {longest} tokens, the limit is {reading.max_response_tokens}: raise "
                    "generation.max_new_tokens, or set data.long_prompts=truncate (or drop)"
                )
            given = {key: tokens[: reading.max_response_tokens] for key, tokens in given.items()}
            same = len(given) > 1 and len(set(map(tuple, given.values()))) == 1
            if long_prompts == "drop" or same:
                rows.num_dropped += 1
                continue
            rows.num_cut += 1
        if len(tokens) > reading.max_prompt_tokens:
            too_long.append((where, len(tokens)))
            if long_prompts != "truncate":
                continue
            tokens, text = _truncate(tokens, reading.max_prompt_tokens, reading.tokenizer)
        for key, response in given.items():
            rows.answers[key].append(response)
        for key, number in rows.columns.items():
            rows.numbers[key].append([number_of(where, record, *number)])
        if rows.marks:
            rows.numbers[rows.marks].append(row.marks[: len(next(iter(given.values())))])
        rows.tokens.extend(tokens)
        rows.ends.append(len(rows.tokens))
        rows.texts.append(text)
        rows.remarks.update(filter(None, [row.remark]))
        record = record | {SOURCE: name} if name and record.get(SOURCE) is None else record
        # A text beside a conversation stays, so that it is known which of them is the prompt.
        also = any(isinstance(record.get(name), list) for name in INSTEAD.get(reading.key, ()))
        texts = () if row.is_plain and also else (reading.key,) if row.is_plain else (TEXT,) if given else ()
        others = {name: one for name, one in record.items() if name not in (*reading.columns.values(), *texts)}
        rows.names |= dict.fromkeys(others)
        rows.kept.append(json.dumps(others, default=_as_text))


def _as_text(value: Any) -> str:
    """Returns what JSON has no type for, such as a date, as text; bytes that are not UTF-8 with escapes."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _truncate(tokens: list[int], limit: int, tokenizer: Tokenizer) -> tuple[list[int], str]:
    bos = tokens[:1] if tokens[0] == tokenizer.bos_token_id and limit > 1 else []
    last = tokens[-(limit - len(bos)) :]
    return bos + last, tokenizer.decode(last)


def _too_long_message(too_long: list[tuple[str, int]], limit: int, *, dropped_all: bool) -> str:
    where, length = too_long[0]
    longest_place, longest = max(too_long, key=lambda item: item[1])
    longest_place = longest_place.removeprefix(where.rpartition(", ")[0] + ", ")
    others = ""
    if len(too_long) > 1:
        others = f" ({len(too_long)} prompts are too long; the longest, {longest_place}, has {longest})"
    left = "; data.long_prompts=drop leaves no prompt" if dropped_all else ""
    fix = "raise data.max_prompt" + ("" if dropped_all else ", or set data.long_prompts=truncate (or drop)")
    return f"{where}: the prompt has {length} tokens, the limit is {limit}{others}{left}: {fix}"
