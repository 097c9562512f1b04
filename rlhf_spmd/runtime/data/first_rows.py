"""The first rows of data files, read as a run reads them, but without its tokenizer: `check` starts no torch."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_spmd.config.options import Config, prompt_files
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import TABLES, every_file, kind_of_file
from rlhf_spmd.model.texts.tokenizer_files import has_chat_template, no_chat_template
from rlhf_spmd.runtime.data.messages import Message
from rlhf_spmd.runtime.data.readers import number_of, read_records, without_nulls_inside
from rlhf_spmd.runtime.data.row_tokens import Reading, check_form, read_row

NUM_ROWS = 100  # of each file


class Characters:
    """Stands in for a tokenizer: a token for each character."""

    bos_token_id = None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Returns the tokens of a text."""
        return list(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return "".join(map(chr, tokens))


def check_first_rows(config: Config) -> None:
    """Raises UserError for the first row that a run cannot read: it lacks a column, or has another type there. What
    depends on the tokenizer and the chat template (lengths, tokens) is not checked."""
    algorithm, forms, tokenizer = config.algorithm, dict[str, str](), Characters()
    folder = config.files().tokenizer
    lacks = folder if folder and not config.data.chat_template and not has_chat_template(Path(folder)) else ""
    reading = Reading(
        tokenizer,  # type: ignore[arg-type]  # it has what rows are read with
        max_prompt_tokens=config.data.max_prompt,
        key=config.data.key or algorithm.prompts,
        columns=algorithm.responses,
        render=partial(_rendered, lacks),
        turns=config.data.turns,
        marks=bool(algorithm.assistant_tokens),
        template_kwargs=config.data.chat_template_kwargs,
    )
    for path in every_file(prompt_files(config)):
        records = read_records(path, reading.key, reading.others, most=NUM_ROWS)
        if not records:
            raise UserError(f"{path} is empty: it needs at least one prompt")
        for place, record in records:
            where = f"{path}, {place}"
            row = read_row(where, without_nulls_inside(record) if kind_of_file(path) in TABLES else record, reading)
            if row is not None:
                check_form(row, where, forms)
                for number in algorithm.row_numbers.values():
                    number_of(where, record, number.column, number.default)


def _rendered(lacks: str, where: str, messages: Sequence[Message], *, answers: bool = True, **_: Any) -> str:
    """Renders a conversation as text that grows with its messages, as chat templates write it.

    lacks: the folder of a tokenizer without a chat template.
    """
    if lacks:
        raise no_chat_template(where, lacks)
    lines = (f"{message['role']}: {message.get('content', message)}\n" for message in messages)
    return "".join(lines)
