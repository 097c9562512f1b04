"""What a row of the data set says, as tokens: its prompt and, where the algorithm learns from them, its responses.

A row with responses has one of these forms (a conversation is a list of messages):

    prompt and responses         texts, or conversations
    responses                    two of them, whose common beginning is the prompt
    `messages`                   a conversation; the assistant's turns are the response
    `text`                       its first token is the prompt, all others are the response

Two conversations beside a prompt that is text begin with their prompt, and the text is not read; if both begin with
the assistant, the text is the user's message before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.texts.written import changed
from rlhf_spmd.runtime.data.messages import (
    ASSISTANT,
    Message,
    is_learned,
    learned_places,
    messages_of,
    says_something,
    with_system,
)
from rlhf_spmd.runtime.data.readers import (
    CONVERSATION,
    CONVERSATIONS,
    TEXT,
    Record,
    first_of,
    lacks,
    others_of,
    text_of,
)
from rlhf_spmd.runtime.data.template_arguments import arguments_of, names_of

if TYPE_CHECKING:
    from rlhf_spmd.model.texts.tokenizer import Tokenizer

# where (for messages), a conversation, answers=whether its answer begins behind it, and what a row gives the template
# (template_arguments.py), if it does -> text
Render = Callable[..., str]
# where, a conversation, number of its first message that is learned, and what a row gives the template; raises
# UserError for what would be lost
Check = Callable[..., None]
OTHER_TEXT = "whose {key!r} is not in their conversations, which are read instead"
CHANGED = "of which the chat template shortens or changes what a message of the role {role} says"
NOT_RENDERED = "of text, which no chat template renders, so that nothing reads {names}"


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read.

    max_prompt_tokens: a longer prompt is an error, is cut to its last tokens (a beginning-of-sequence token stays), or
        is left out, as long_prompts says.
    columns: of responses, by key.
    max_response_tokens: a longer response is an error, loses its last tokens, or its whole row is left out.
    eos_ids: the first one ends a response.
    render: makes the text of a conversation, with template_kwargs and what a row has for the template.
    check: raises UserError for a conversation of which the template would lose something.
    marks: whether a response may have tokens that are not learned.
    template_kwargs: of all rows, whose own ones replace them.
    """

    tokenizer: Tokenizer
    max_prompt_tokens: int
    key: str = "prompt"
    long_prompts: str = "error"
    columns: Mapping[str, str] = field(default_factory=dict)
    max_response_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    render: Render | None = None
    check: Check | None = None
    turns: Literal["last", "all"] = "last"
    marks: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def others(self) -> tuple[str, ...]:
        """The columns of which a row has one, if it has no prompt."""
        return others_of(self.key, tuple(self.columns.values()))


@dataclass(frozen=True, slots=True)
class RowTokens:
    """A tokenised row.

    form: how it is written, for messages.
    text: of the prompt.
    is_plain: the prompt is a column of its own, as text.
    marks: 1 for each token of a single response that is learned.
    remark: for the banner, after a number of rows; empty: nothing is odd.
    """

    form: str
    text: str
    is_plain: bool
    prompt: list[int]
    responses: Mapping[str, list[int]] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    remark: str = ""


class _Row:
    """A row, with what reads it. Methods raise UserError."""

    def __init__(self, where: str, record: Record, reading: Reading):
        self.where, self.record, self.reading = where, record, reading
        self.is_rendered, self.remark = False, ""

    def error(self, text: str) -> UserError:
        """Returns an error about this row."""
        return UserError(f"{self.where}: {text}")

    def text(self, column: str) -> str:
        """Returns a column that must be text, and not empty."""
        text = text_of(self.where, self.record, column)
        check_text(self.where, text, f"the value of {column!r}")
        return text

    def messages(self, column: str) -> list[Message]:
        """Returns a column that must be a conversation."""
        return messages_of(self.where, self.record, column)

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Returns a conversation that begins with the row's system message."""
        return with_system(self.where, self.record, messages)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """What the row gives the chat template, read at the first conversation: beside text it may mean other
        things."""
        return arguments_of(self.where, self.record, self.reading.template_kwargs)

    def render(self, messages: list[Message], *, answers: bool = True) -> str:
        """Returns the text of a conversation."""
        render = self.reading.render
        if render is None:
            raise self.error("the prompt is a list of messages, and only a string can be read here")
        self.is_rendered = True
        text = render(self.where, messages, **self.arguments, **({} if answers else {"answers": False}))
        check_text(self.where, text, "the conversation")
        return text

    def check_written(self, messages: list[Message], learned: int) -> None:
        """Checks that the chat template writes what messages say. learned: number of the first one that is learned."""
        if self.reading.check is not None:
            self.is_rendered = True
            self.reading.check(self.where, messages, learned, **self.arguments)

    def check_unchanged(self, messages: list[Message], learned: int, text: str) -> None:
        """Checks that the text of a conversation has what its messages say, as they say it. learned: see
        check_written."""
        for place in changed(messages, text, learned) if self.reading.check is not None else ():
            role = messages[place]["role"]
            if role == ASSISTANT:
                raise self.error(
                    f"the chat template shortens or changes what message {place + 1} ({role}) says, so a model would "
                    "learn other words; give data.chat_template=FILE with one that does not, or change the message"
                )
            self.remark = CHANGED.format(role=role)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Returns the tokens of a text, at least one."""
        tokens = self.reading.tokenizer.encode(text, special=special)
        if not tokens:
            raise self.error(f"the tokenizer makes no token from the prompt {text!r}: remove the entry")
        return tokens

    def encode_after(self, before: str, tokens: list[int], text: str, *, special: bool) -> list[int]:
        """Returns the tokens of a text that follows another one, whose tokens stay as they are."""
        tokenizer = self.reading.tokenizer
        joined = tokenizer.encode(before + text, special=special)
        if joined[: len(tokens)] == tokens:
            return joined[len(tokens) :]
        alone = tokenizer.encode(text, special=special)
        return alone[1:] if alone and alone[0] == tokenizer.bos_token_id else alone

    def ended(self, tokens: list[int]) -> list[int]:
        """Returns a response with the first of the ends of sequence (Tokenizer.eos_ids), if it has none."""
        ends = self.reading.eos_ids
        return tokens if not ends or (tokens and tokens[-1] in ends) else [*tokens, ends[0]]


def read_row(where: str, record: Record, reading: Reading) -> RowTokens | None:
    """Reads the tokens of a row; None if nothing in it can be learned. Raises UserError."""
    row = _Row(where, record, reading)
    tokens = _with_responses(row) if reading.columns else _prompt_alone(row)
    names = names_of(record, reading.template_kwargs)
    if tokens is None or not names or row.is_rendered or reading.render is None:
        return tokens
    return replace(tokens, remark=NOT_RENDERED.format(names=" and ".join(names)))


def check_form(row: RowTokens, where: str, forms: dict[str, str]) -> None:
    """Raises UserError for a row that is written in another way than those before it. forms: how they are written ->
    the place of the first one, to which this row is added."""
    forms.setdefault(row.form, where)
    if len(forms) > 1:
        (form, place), *_ = forms.items()
        raise UserError(f"{where}: the row has {row.form}, and that of {place} has {form}: write all in one way")


def check_text(where: str, text: str, what: str) -> None:
    """Raises UserError for a text that is empty or not Unicode."""
    if not text.strip():
        raise UserError(f"{where}: {what} is empty: write one or remove the entry")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: {what} has half a surrogate pair at character {error.start + 1}, which is not text: "
            "write the character itself or both halves"
        ) from None


# ---- the forms of rows ----------------------------------------------------------------------------------------------


def _prompt_alone(row: _Row) -> RowTokens:
    """Returns the tokens of a prompt without responses; the last answer of a conversation is left out."""
    key, record = row.reading.key, row.record
    column = first_of(record, (key, *row.reading.others)) or key
    if column == key and not isinstance(record.get(column), list):
        text = row.text(column)
        return RowTokens("", text, True, row.encode(text, special=True))
    messages = row.messages(column)
    messages = row.with_system(_asked(row, messages[:-1] if messages[-1]["role"] == ASSISTANT else messages))
    row.check_written(messages, len(messages))
    text = row.render(messages)
    row.check_unchanged(messages, len(messages), text)
    return RowTokens("", text, False, row.encode(text, special=False), remark=row.remark)


def _asked(row: _Row, messages: list[Message]) -> list[Message]:
    """Returns the messages before an answer, at least one."""
    if not messages:
        raise row.error("the conversation has no message before the assistant's: add the question")
    return messages


def _with_responses(row: _Row) -> RowTokens | None:
    """Returns the tokens of a row with responses."""
    record, key, columns = row.record, row.reading.key, list(row.reading.columns.values())
    has_prompt = record.get(key) is not None
    missing = [column for column in columns if record.get(column) is None]
    if len(columns) == 1 and (missing or not has_prompt):
        instead = first_of(record, (*CONVERSATIONS, TEXT))
        if instead is None:
            fix = f"add it, or write the row as {CONVERSATION!r} or {TEXT!r}"
            raise lacks(row.where, record, missing[0] if has_prompt else key, fix)
        return _of_text(row) if instead == TEXT else _of_conversation(row, instead)
    if missing:
        raise lacks(row.where, record, missing[0])
    are_lists = {isinstance(record[column], list) for column in columns}
    if len(columns) > 1 and are_lists == {True} and isinstance(record.get(key), str):
        has_prompt = False  # the text says the same as the conversations
    if has_prompt:
        are_lists.add(isinstance(record[key], list))
    if len(are_lists) > 1:
        names = ", ".join(map(repr, [key, *columns] if has_prompt else columns))
        raise row.error(f"{names} are strings and lists of messages: write all as strings, or all as lists of messages")
    tokens = (_of_messages if are_lists == {True} else _of_strings)(row, has_prompt=has_prompt)
    if tokens is not None and len(columns) > 1 and len({*map(tuple, tokens.responses.values())}) == 1:
        raise row.error(f"{' and '.join(map(repr, columns))} are equal, so there is nothing to compare: remove the row")
    return tokens


def _of_strings(row: _Row, *, has_prompt: bool) -> RowTokens:
    reading = row.reading
    texts = {key: row.text(column) for key, column in reading.columns.items()}
    if has_prompt:
        prompt = row.text(reading.key)
    else:  # a space at the end of what texts have in common belongs to what follows
        prompt = _common(*texts.values()).removesuffix(" ")
        check_text(row.where, prompt, f"what {' and '.join(map(repr, reading.columns.values()))} have in common")
        texts = {key: text[len(prompt) :] for key, text in texts.items()}
    tokens = row.encode(prompt, special=True)
    responses = {key: row.ended(row.encode_after(prompt, tokens, text, special=True)) for key, text in texts.items()}
    marks = [1] * max(map(len, responses.values()))
    return RowTokens("a prompt and responses", prompt, has_prompt, tokens, responses, marks)


def _of_messages(row: _Row, *, has_prompt: bool) -> RowTokens | None:
    reading, plain = row.reading, row.record.get(row.reading.key) or ""
    answers = {key: row.messages(column) for key, column in reading.columns.items()}
    if has_prompt:
        before = row.messages(reading.key)
    else:
        before = _common(*answers.values())
        answers = {key: messages[len(before) :] for key, messages in answers.items()}
    if not before and plain and all(messages[0]["role"] == ASSISTANT for messages in answers.values()):
        before = [{"role": "user", "content": row.text(reading.key)}]
    if not before:
        raise row.error(
            f"the conversations have no message in common: write the column {reading.key!r} as a list of messages"
        )
    for key, messages in answers.items():
        places = learned_places(row.where, messages)
        if not reading.marks and (not places or len(places) < len(_places_of_assistant(messages))):
            raise row.error(
                f"{reading.columns[key]!r} has no message of the assistant, or one that is marked 0, and in pairs all "
                "are learned: add its answer, or remove the row"
            )
        if not places:
            return None
        answers[key] = messages[: places[-1] + 1]
    texts = [message.get("content", "").strip() for message in before]
    differs = isinstance(plain, str) and plain.strip() and not any(_overlap(text, plain) for text in texts)
    made = {key: _answered(row, row.with_system(before), messages) for key, messages in answers.items()}
    (text, tokens, _, marks), *_ = made.values()
    responses = {key: response for key, (_, _, response, _) in made.items()}
    remark = OTHER_TEXT.format(key=reading.key) if differs else row.remark
    return RowTokens("conversations", text, False, tokens, responses, marks, remark)


def _overlap(text: str, plain: str) -> bool:
    """Returns whether a message says what a prompt beside it says, or a part of it."""
    return bool(text) and (text in plain or plain.strip() in text)


def _of_conversation(row: _Row, column: str) -> RowTokens | None:
    reading, messages = row.reading, row.with_system(row.messages(column))
    places = learned_places(row.where, messages)
    if reading.turns == "last" or not reading.marks:
        places = [place for place in places if place == _places_of_assistant(messages)[-1]]
    if not places:
        return None
    before = _asked(row, messages[: places[0]])
    text, tokens, response, marks = _answered(row, before, messages[places[0] : places[-1] + 1])
    responses = dict.fromkeys(reading.columns, response)
    return RowTokens(f"the column {CONVERSATION!r}", text, False, tokens, responses, marks, row.remark)


def _of_text(row: _Row) -> RowTokens:
    text = row.text(TEXT)
    prompt, *response = row.ended(row.encode(text, special=True))
    start, responses = row.reading.tokenizer.decode([prompt]), dict.fromkeys(row.reading.columns, response)
    return RowTokens(f"the column {TEXT!r}", start, False, [prompt], responses, [1] * len(response))


def _answered(row: _Row, before: list[Message], after: list[Message]) -> tuple[str, list[int], list[int], list[int]]:
    """Returns text and tokens of a conversation's beginning, tokens of the turns after it up to the assistant's last
    one, and which of these tokens are learned."""
    reading, places = row.reading, _places_of_assistant(after)
    row.check_written([*before, *after[: places[-1] + 1]], len(before))
    text = start = row.render(before)
    prompt = row.encode(text, special=False)
    tokens, marks = list(prompt), list[int]()
    for place in places:
        if not says_something(after[place]):
            raise row.error("a message of the assistant is empty: write it, or remove the row")
        opened = row.render([*before, *after[:place]])
        closed = row.render([*before, *after[: place + 1]], answers=False)
        if not (opened.startswith(text) and closed.startswith(opened)):
            other = "set data.turns=last, or " if len(places) > 1 and reading.marks else ""
            raise row.error(
                "the chat template does not only add to what it writes of the earlier messages, or writes a given "
                f"answer in another way than the one that it begins with {opened[-20:]!r}, so a turn cannot be told "
                f"from the others: {other}give data.chat_template=FILE"
            )
        between = row.encode_after(text, tokens, opened[len(text) :], special=False) if opened != text else []
        turn = row.encode_after(opened, [*tokens, *between], closed[len(opened) :], special=False)
        kept = up_to_end(turn, reading.tokenizer, reading.eos_ids)
        # templates that write the end of a turn only with what follows, or whose next turn begins with it
        is_end = bool(marks and between) and tokens[-1] not in reading.eos_ids and between[0] in reading.eos_ids
        marks += marks[-1:] * is_end + [0] * (len(between) - is_end)
        marks += [int(is_learned(row.where, after[place]))] * len(kept)
        tokens += between + kept
        if place < places[-1]:  # what the template writes behind an end of sequence belongs to no turn
            marks += [0] * (len(turn) - len(kept))
            tokens += turn[len(kept) :]
        text = closed
    row.check_unchanged([*before, *after[: places[-1] + 1]], len(before), text)
    ended = row.ended(tokens)
    return start, prompt, ended[len(prompt) :], marks + [1] * (len(ended) - len(tokens))


def up_to_end(tokens: list[int], tokenizer: Tokenizer, eos_ids: Sequence[int]) -> list[int]:
    """Returns a turn without the white space that a chat template writes after its end of sequence."""
    places = [place for place, token in enumerate(tokens) if token in eos_ids]
    if not places or tokenizer.decode(tokens[places[-1] + 1 :]).strip():
        return tokens
    return tokens[: places[-1] + 1]


def _places_of_assistant(messages: Sequence[Message]) -> list[int]:
    """Returns the places of the assistant's messages."""
    return [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]


def _common(first: Any, second: Any) -> Any:
    """Returns the common beginning of two texts or conversations."""
    shorter = min(len(first), len(second))
    return first[: next((place for place in range(shorter) if first[place] != second[place]), shorter)]
