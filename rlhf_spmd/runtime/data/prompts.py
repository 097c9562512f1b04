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
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import TABLES, files_of, kind_of_file, stem_of
from rlhf_spmd.files.reading import is_file, is_folder
from rlhf_spmd.plan.runtime_words import PROMPTS
from rlhf_spmd.runtime.data.messages import SYSTEMS
from rlhf_spmd.runtime.data.packed_rows import PADDING, NumberRows, PackedRows, TextRows, TokenRows
from rlhf_spmd.runtime.data.prompt_order import PromptOrder
from rlhf_spmd.runtime.data.readers import (
    CONVERSATIONS,
    INSTEAD,
    SOURCE,
    TEXT,
    Record,
    number_of,
    read_records,
    without_nulls_inside,
)
from rlhf_spmd.runtime.data.row_tokens import Reading, RowTokens, check_form, read_row
from rlhf_spmd.runtime.data.template_arguments import KWARGS, TOOLS

if TYPE_CHECKING:
    import torch

    from rlhf_spmd.model.texts.tokenizer import Tokenizer

LOST = {  # rows of the file, by the name of their count
    "truncated": "cut at data.max_prompt",
    "cut": "with responses cut at generation.max_new_tokens",
    "dropped": "too long and dropped",
    "silent": "without an answer of the assistant to learn and dropped",
}
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
    # rows that were truncated or dropped, whose response was cut, and silent ones, in which nothing is learned
    counts: Mapping[str, int] = field(default_factory=Counter)
    responses: Mapping[str, TokenRows] = field(default_factory=dict)  # by key, where the set has some for each prompt
    columns: TextRows | None = None  # all other columns, a JSON object for each prompt; None: there are none
    sizes: tuple[int, ...] = ()  # number of prompts of each file; (): there is one
    weights: tuple[float, ...] = ()  # of the files (prompt_order.py); (): they are one set
    shuffle: bool = True  # epochs are permutations; else the order of the files
    numbers: Mapping[str, NumberRows] = field(default_factory=dict)  # by key, of rows or of the tokens of a response
    column_names: tuple[str, ...] = ()  # of the other columns of all rows together
    remarks: tuple[str, ...] = ()  # for the banner: what is odd about the rows
    _order: PromptOrder = field(init=False, repr=False, compare=False)
    hashes: dict[str, str] = field(default_factory=dict, repr=False, compare=False)  # known ones

    def __post_init__(self) -> None:
        sizes = self.sizes if self.weights else (len(self.prompts),)  # without weights the files are one set
        object.__setattr__(self, "_order", PromptOrder(sizes, self.weights or (1.0,), self.seed, self.shuffle))

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lost(self) -> list[str]:
        """Says how many rows of the files were cut or dropped, and why, and what else is odd about them."""
        return [*(f"{num} {LOST[kind]}" for kind, num in self.counts.items() if num), *self.remarks]

    def padded(self, key: str, index_B: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the data that some rows have of a key, [B, *shape]: tokens, padded with -1, or numbers, padded with
        0."""
        return {PROMPTS: self.prompts, **self.responses, **self.numbers}[key].padded(index_B, shape)

    def records(self, index_B: Sequence[int]) -> list[Record]:
        """Returns the other columns of these prompts, each with those that its row has."""
        return [{} if self.columns is None else json.loads(self.columns[int(index)]) for index in index_B]

    def whole_records(self, index_B: Sequence[int]) -> list[Record]:
        """Returns `records` with the columns of all rows: None where a row has none."""
        return [dict.fromkeys(self.column_names) | record for record in self.records(index_B)]

    def batch(self, iteration: int, rollout_batch: int) -> list[int]:
        """Returns the indices of the prompts of one iteration (from 0): a pure function of (seed, iteration)."""
        return self._order.batch(iteration, rollout_batch)

    def following(self, start: int, num: int) -> list[int]:
        """Returns the indices of some prompts in the order of iterations of one prompt.

        start: how many come before them.
        """
        return [self._order.batch(place, 1)[0] for place in range(start, start + num)]

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
        if name not in self.hashes:
            digest = hashlib.sha256(text.encode())
            for rows in parts:
                rows.add_to(digest)
            self.hashes[name] = digest.hexdigest()
        return self.hashes[name]

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
    padded = [row + [PADDING] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64).view(len(rows), width)


@dataclass(slots=True)
class _Rows:
    """The prompts of one or more files.

    numbers: columns with numbers, by key.
    marks: the key of the marks of responses; empty: there are none.
    """

    reading: Reading
    number_columns: Mapping[str, NumberColumn]
    marks: str
    tokens: array = field(default_factory=lambda: array("i"))  # nine times smaller than lists
    ends: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    responses: dict[str, list[list[int]]] = field(default_factory=dict)
    numbers: dict[str, list[Sequence[float]]] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)  # all others, as JSON
    names: dict[str, None] = field(default_factory=dict)  # of the other columns of all rows
    forms: dict[str, str] = field(default_factory=dict)  # how rows are written -> the place of the first such row
    too_long: list[tuple[str, int]] = field(default_factory=list)  # place and tokens of prompts of the newest file
    counts: Counter[str] = field(default_factory=Counter)  # as of PromptSet
    remarks: Counter[str] = field(default_factory=Counter)  # -> number of rows

    def __post_init__(self) -> None:
        self.responses = {key: [] for key in self.reading.columns}
        self.numbers = {key: [] for key in (*self.number_columns, self.marks) if key}

    def read_part(self, part: Path, source: str) -> None:
        """Adds the rows of a file, or of all files of a folder or a pattern. Raises UserError.

        source: for the column data_source of rows that have none; empty: no such column.
        """
        num_before, action, before = len(self.texts), self.reading.long_prompts, self.counts.copy()
        self.too_long.clear()
        for path in files_of(part):
            self._read_file(path, source)
        num_long = len(self.too_long)
        self.counts["truncated" if action == "truncate" else "dropped"] += num_long
        if num_long and action == "error":
            (where, length), longest = self.too_long[0], max(length for _, length in self.too_long)
            others = f" ({num_long} prompts are too long)" if num_long > 1 else ""
            raise UserError(
                f"{where}: the prompt has {length} tokens, the limit is {self.reading.max_prompt_tokens}{others}: "
                f"raise data.max_prompt (to {longest}), or set data.long_prompts=truncate (or drop)"
            )
        if len(self.texts) == num_before:
            lost = self.counts - before
            raise UserError(
                f"{part} has no row to learn from: {lost['dropped']} are too long (raise data.max_prompt or "
                f"generation.max_new_tokens), {lost['silent']} have no message of the assistant (add the answers)"
                if lost
                else f"{part} is empty: it needs at least one prompt"
            )

    def _read_file(self, path: Path, source: str) -> None:
        """Adds the rows of a file."""
        reading, is_arrow = self.reading, kind_of_file(path) in TABLES
        for place, record in read_records(path, reading.key, reading.others):
            where = f"{path}, {place}"
            row = read_row(where, without_nulls_inside(record) if is_arrow else record, reading)
            if row is None:
                self.counts["silent"] += 1
                continue
            check_form(row, where, self.forms)
            responses = self._within_limit(where, row)
            if responses is None:
                self.counts["dropped"] += 1
                continue
            tokens, text = row.prompt, row.text
            if len(tokens) > reading.max_prompt_tokens:
                self.too_long.append((where, len(tokens)))
                if reading.long_prompts != "truncate":
                    continue
                limit = reading.max_prompt_tokens
                first = tokens[:1] if tokens[0] == reading.tokenizer.bos_token_id and limit > 1 else []
                last = tokens[len(first) - limit :]
                tokens, text = first + last, reading.tokenizer.decode(last)
            self.tokens.extend(tokens)
            self.ends.append(len(self.tokens))
            self.texts.append(text)
            for key, response in responses.items():
                self.responses[key].append(response)
                if self.marks:
                    self.numbers[self.marks].append(row.marks[: len(response)])
            for key, (column, default) in self.number_columns.items():
                self.numbers[key].append([number_of(where, record, column, default)])
            self.remarks.update(filter(None, [row.remark]))
            self._add_columns(record, row, source)

    def _within_limit(self, where: str, row: RowTokens) -> Mapping[str, list[int]] | None:
        """Returns the responses of a row, cut to the limit; None if the row is left out. Raises UserError."""
        limit, action = self.reading.max_response_tokens, self.reading.long_prompts
        longest = max(map(len, row.responses.values()), default=0)
        if longest <= limit:
            return row.responses
        if action == "error":
            raise UserError(
                f"{where}: the response has {longest} tokens, the limit is {limit}: raise generation.max_new_tokens, "
                "or set data.long_prompts=truncate (or drop)"
            )
        cut = {key: tokens[:limit] for key, tokens in row.responses.items()}
        if action == "drop" or (len(cut) > 1 and len({*map(tuple, cut.values())}) == 1):
            return None
        self.counts["cut"] += 1
        return cut

    def _add_columns(self, record: Record, row: RowTokens, source: str) -> None:
        """Adds the columns that are neither prompt nor response. A text beside a conversation stays, so that it is
        known which of them is the prompt."""
        reading, left_out = self.reading, {*self.reading.columns.values()}
        if row.is_plain and not any(isinstance(record.get(name), list) for name in INSTEAD.get(reading.key, ())):
            left_out.add(reading.key)
        elif row.responses and not row.is_plain:
            left_out.add(TEXT)
        columns = {name: value for name, value in record.items() if name not in left_out}
        if source and columns.get(SOURCE) is None:
            columns[SOURCE] = source
        self.names |= dict.fromkeys(columns)
        self.columns.append(json.dumps(columns, default=_as_text))

    def unread(self) -> list[str]:
        """Returns a note about columns that nothing reads, of rows with responses; others are for reward functions."""
        read = {self.reading.key, *(column for column, _ in self.number_columns.values())}
        if any(form.startswith("the column") for form in self.forms):
            read |= {*CONVERSATIONS, TEXT}
        return unread(self.names, read) if self.reading.columns else []


def load_prompts(
    path: str | Path | Sequence[str],
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    weights: Sequence[float] = (),
    shuffle: bool = True,
    numbers: Mapping[str, NumberColumn] = MappingProxyType({}),
    marks: str = "",
    **options: Any,
) -> PromptSet:
    """Reads files (files/data_files.py), folders or patterns of them, one or several: rows, or prompts of .txt, a line
    each and taken literally. Raises UserError naming file and line for anything it can't use.

    seed, weights, shuffle: determine the order (prompt_order.py).
    numbers: columns with numbers, by key.
    marks: the key of which tokens of a response are learned.
    options: of row_tokens.Reading.

    A conversation in which the assistant says nothing is left out. Columns that are neither prompt nor response are
    kept for reward functions; where several files are named, `data_source` is the name of the one that a row without
    such a column is from.
    """
    reading = Reading(tokenizer, marks=bool(marks), **options)
    paths = [Path(part) for part in ([path] if isinstance(path, str | Path) else path)]
    rows, sizes = _Rows(reading, numbers, marks), []
    for part, source in zip(paths, _sources(paths), strict=True):
        num_before = len(rows.texts)
        rows.read_part(part, source)
        sizes.append(len(rows.texts) - num_before)
    remarks = [f"{num} {remark}" for remark, num in rows.remarks.items()]
    return PromptSet(
        TokenRows(np.frombuffer(rows.tokens, np.int32), np.array(rows.ends, dtype=np.int64)),
        TextRows.of(rows.texts),
        seed,
        ",".join(map(str, paths)),
        responses={key: TokenRows.of(responses) for key, responses in rows.responses.items()},
        columns=TextRows.of(rows.columns) if any(columns != "{}" for columns in rows.columns) else None,
        sizes=tuple(sizes),
        weights=tuple(weights),
        shuffle=shuffle,
        numbers={key: NumberRows.of(values) for key, values in rows.numbers.items()},
        column_names=tuple(rows.names),
        remarks=(*remarks, *rows.unread()),
        counts=rows.counts,
    )


def unread(names: Iterable[str], read: Iterable[str]) -> list[str]:
    """Returns a note about columns that nothing reads, if there are some. read: those that something reads, beside
    those that are always read."""
    known = {TOOLS, KWARGS, *SYSTEMS, SOURCE, *read}
    others = [name for name in names if name not in known]
    return [f"nothing reads the columns {', '.join(others)}"] if others else []


def _sources(parts: Sequence[Path]) -> list[str]:
    """Returns the name that each of several files, folders or patterns has in the column data_source: its name without
    the extension, or its path where two have one name. Nothing for a single one. Raises UserError for a file that is
    named twice."""
    if len(parts) == 1:
        return [""]
    files = Counter(path.resolve() for part in parts for path in files_of(part))
    twice = [path for path, times in files.items() if times > 1]
    if twice:
        raise UserError(f"data.prompts names {twice[0]} twice; name it once, with a larger weight in data.weights")
    stems = [part.name if is_folder(part) else stem_of(part) if is_file(part) else str(part) for part in parts]
    return stems if len(set(stems)) == len(stems) else [str(part) for part in parts]


def _as_text(value: Any) -> str:
    """Returns what JSON has no type for, such as a date, as text; bytes that are not UTF-8 with escapes."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
