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
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.data.readers import (
    ASSISTANT,
    CONVERSATION,
    CONVERSATIONS,
    TEXT,
    Message,
    Record,
    first_of,
    is_learned,
    is_said,
    lacks,
    messages_of,
    others_of,
    text_of,
    with_system,
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
T = TypeVar("T")
OTHER_TEXT = "whose {key!r} is not in their conversations, which are read instead"
NOT_RENDERED = "of text, which no chat template renders, so that nothing reads {names}"


class RowOptions(TypedDict, total=False):
    """The fields of a Reading that a user decides on."""

    key: str
    long_prompts: str
    columns: Mapping[str, str]
    max_response_tokens: int
    eos_ids: tuple[int, ...]
    turns: Literal["last", "all"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read; see load_prompts."""

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
    marks: bool = False  # whether a response may have tokens that are not learned
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of all rows, whose own ones replace them

    def rendered(self, where: str, messages: list[Message], *, answers: bool = True) -> str:
        """Renders the text of a conversation. Raises UserError."""
        if self.render is None:
            raise UserError(f"{where}: the prompt is a list of messages, and only a string can be read here")
        text = self.render(where, messages) if answers else self.render(where, messages, answers=False)
        check_unicode(where, text, "the conversation")
        return text

    def check_written(self, where: str, messages: list[Message], learned: int) -> None:
        """Raises UserError if the chat template does not write what messages say. learned: number of the first one
        that is learned."""
        if self.check is not None:
            self.check(where, messages, learned)

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
    remark: for the heading, after a number of rows; empty: nothing is odd.
    """

    form: str
    text: str
    is_plain: bool
    prompt: list[int]
    responses: Mapping[str, list[int]] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    remark: str = ""


def read_row(where: str, record: Record, reading: Reading) -> RowTokens | None:
    """Reads the tokens of a row; None if nothing in it can be learned. Raises UserError."""
    names, render_with = names_of(record, reading.template_kwargs), reading.render
    if not names or render_with is None:
        return _read(where, record, reading)
    given: list[dict[str, Any]] = []

    def arguments() -> dict[str, Any]:
        if not given:  # not before, because a column beside text may mean something else
            given.append(arguments_of(where, record, reading.template_kwargs))
        return given[0]

    def render(where: str, messages: list[Message], *, answers: bool = True) -> str:
        return render_with(where, messages, **arguments(), **({} if answers else {"answers": False}))

    def check(where: str, messages: list[Message], learned: int) -> None:
        if reading.check is not None:
            reading.check(where, messages, learned, **arguments())

    row = _read(where, record, replace(reading, render=render, check=check))
    if row is None or given:
        return row
    return replace(row, remark=NOT_RENDERED.format(names=" and ".join(names)))


def _read(where: str, record: Record, reading: Reading) -> RowTokens | None:
    columns, key = reading.columns, reading.key
    if not columns:
        text, is_rendered = prompt_of(where, record, reading)
        check_text(where, text)
        return RowTokens("", text, not is_rendered, _encoded(where, text, reading, special=not is_rendered))
    lacking = [column for column in (key, *columns.values()) if record.get(column) is None]
    if len(columns) == 1 and lacking:
        instead = first_of(record, (*CONVERSATIONS, TEXT))
        if instead is None:
            raise lacks(where, record, lacking[0], f"add it, or write the row as {CONVERSATION!r} or {TEXT!r}")
        if instead == TEXT:
            return _of_text(where, text_of(where, record, TEXT), reading)
        return _of_conversation(where, with_system(where, record, messages_of(where, record, instead)), reading)
    for column in columns.values():
        if column in lacking:
            raise lacks(where, record, column)
    explicit = key not in lacking
    kinds = {column: isinstance(record[column], list) for column in columns.values()}
    if explicit and isinstance(record[key], str) and len(kinds) > 1 and all(kinds.values()):
        explicit = False  # the text says the same as the conversations
    kinds |= {key: isinstance(record[key], list)} if explicit else {}
    if len(set(kinds.values())) > 1:
        strings, lists = ([repr(name) for name, is_list in kinds.items() if is_list == which] for which in (0, 1))
        raise UserError(
            f"{where}: the value of {' and '.join(lists)} is a list of messages, that of {' and '.join(strings)} is a "
            "string: write all of them as strings, or all as lists of messages"
        )
    made = (_of_messages if any(kinds.values()) else _of_strings)(where, record, reading, explicit=explicit)
    if made is None:
        return None
    tokens = list(made.responses.values())
    if len(tokens) > 1 and tokens[0] == tokens[1]:
        one, other = map(repr, columns.values())
        raise UserError(f"{where}: {one} and {other} are equal, so there is nothing to compare: remove the row")
    return made


def check_form(row: RowTokens, where: str, forms: dict[str, str]) -> None:
    """Raises UserError for a row that is written in another way than those before it. forms: how they are written ->
    the place of the first one, to which this row is added."""
    if (first := forms.setdefault(row.form, where)) == where and len(forms) > 1:
        form, at = next(iter(forms.items()))
        raise UserError(f"{first}: the row has {row.form}, and that of {at} has {form}: write all in one way")


def prompt_of(where: str, record: Record, reading: Reading) -> tuple[str, bool]:
    """Returns the text of a prompt without responses, and whether it was rendered from a conversation, whose last
    answer is left out."""
    column = first_of(record, (reading.key, *reading.others)) or reading.key
    if column == reading.key and not isinstance(record.get(column), list):
        return text_of(where, record, column), False
    messages = messages_of(where, record, column)
    if messages[-1]["role"] == ASSISTANT:
        messages = messages[:-1]
    if not messages:
        raise UserError(f"{where}: the conversation has no message before the assistant's: add the question")
    messages = with_system(where, record, messages)
    reading.check_written(where, messages, len(messages))
    return reading.rendered(where, messages), True


def check_text(where: str, text: str, what: str = "the prompt") -> None:
    """Raises UserError for a text that is empty or no Unicode."""
    if not text.strip():
        raise UserError(f"{where}: {what} is empty: write one or remove the entry")
    check_unicode(where, text, what)


def check_unicode(where: str, text: str, what: str) -> None:
    """Raises UserError for a text that is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: {what} has half a surrogate pair at character {error.start + 1}, which is not text: "
            "write the character itself or both halves"
        ) from None


# ---- the forms of rows with responses -------------------------------------------------------------------------------


def _of_strings(where: str, record: Record, reading: Reading, *, explicit: bool) -> RowTokens:
    texts = {name: text_of(where, record, column) for name, column in reading.columns.items()}
    # a space at the end of what texts have in common belongs to what follows
    common = "" if explicit else "".join(_common(*texts.values())).removesuffix(" ")
    prompt = text_of(where, record, reading.key) if explicit else common
    for name, column in reading.columns.items():
        check_text(where, texts[name], f"the value of {column!r}")
        texts[name] = texts[name] if explicit else texts[name][len(prompt) :]
    if explicit or not prompt:
        what = "the prompt" if explicit else f"what {' and '.join(map(repr, reading.columns.values()))} have in common"
        check_text(where, prompt, what)
    tokens = _encoded(where, prompt, reading, special=True)
    responses = {name: _ended(_continued(prompt, tokens, text, reading), reading) for name, text in texts.items()}
    marks = [1] * max(map(len, responses.values()))
    return RowTokens("a prompt and responses", prompt, explicit, tokens, responses, marks)


def _of_messages(where: str, record: Record, reading: Reading, *, explicit: bool) -> RowTokens | None:
    given = {name: messages_of(where, record, column) for name, column in reading.columns.items()}
    before = messages_of(where, record, reading.key) if explicit else _common(*given.values())
    if not before and record.get(reading.key) and all(one[0]["role"] == ASSISTANT for one in given.values()):
        check_text(where, record[reading.key])
        before, explicit = [{"role": "user", "content": record[reading.key]}], True
    if not before:
        fix = "write" if record.get(reading.key) else "add"
        raise UserError(
            f"{where}: the conversations have no message in common: {fix} the column {reading.key!r}"
            + " as a list of messages" * (fix == "write")
        )
    after = {name: messages if explicit else messages[len(before) :] for name, messages in given.items()}
    for name, column in reading.columns.items():
        if not any(message["role"] == ASSISTANT for message in after[name]):
            raise UserError(f"{where}: {column!r} has no message of the assistant: add its answer, or remove the row")
    said = [message.get("content", "").strip() for message in before if not explicit]
    before = with_system(where, record, before)
    if reading.marks:
        ((name, messages),) = after.items()
        if not (learned := _learned(where, messages)):
            return None
        after = {name: messages[: learned[-1] + 1]}
    elif not all(is_learned(where, one) for every in after.values() for one in every if one["role"] == ASSISTANT):
        raise UserError(
            f"{where}: a message of the assistant is marked 0, and in pairs all are learned: remove the row"
        )
    made = {name: _answered(where, before, messages, reading) for name, messages in after.items()}
    text, tokens, *_ = next(iter(made.values()))
    responses = {name: one[2] for name, one in made.items()}
    marks = next(iter(made.values()))[3]
    plain = record.get(reading.key) or ""  # text beside conversations, which should say the same
    differs = not explicit and plain.strip() and not any(one and (one in plain or plain.strip() in one) for one in said)
    remark = OTHER_TEXT.format(key=reading.key) if differs else ""
    return RowTokens("conversations", text, False, tokens, responses, marks, remark)


def _of_conversation(where: str, messages: list[Message], reading: Reading) -> RowTokens | None:
    turns = _learned(where, messages)
    if reading.turns == "last" or not reading.marks:
        last = max((place for place, message in enumerate(messages) if message["role"] == ASSISTANT), default=-1)
        turns = [place for place in turns if place == last]
    if not turns:
        return None
    if not turns[0]:
        raise UserError(f"{where}: the conversation has no message before the assistant's: add the question")
    text, tokens, response, marks = _answered(where, messages[: turns[0]], messages[turns[0] : turns[-1] + 1], reading)
    return RowTokens(
        f"the column {CONVERSATION!r}", text, False, tokens, {next(iter(reading.columns)): response}, marks
    )


def _learned(where: str, messages: Sequence[Message]) -> list[int]:
    """Returns the places of the assistant's messages that are learned."""
    return [place for place, message in enumerate(messages) if is_learned(where, message)]


def _of_text(where: str, text: str, reading: Reading) -> RowTokens:
    check_text(where, text, f"the value of {TEXT!r}")
    tokens = _ended(_encoded(where, text, reading, special=True), reading)
    first, response = tokens[:1], tokens[1:]
    said = {next(iter(reading.columns)): response}
    return RowTokens(f"the column {TEXT!r}", reading.tokenizer.decode(first), False, first, said, [1] * len(response))


def _answered(
    where: str, before: list[Message], after: list[Message], reading: Reading
) -> tuple[str, list[int], list[int], list[int]]:
    """Returns text and tokens of a conversation's beginning, tokens of the turns after it up to the assistant's last
    one, and which of these tokens are learned."""
    own = [place for place, message in enumerate(after) if message["role"] == ASSISTANT]
    last = own[-1] if own else -1
    reading.check_written(where, [*before, *after[: last + 1]], len(before))
    text = start = reading.rendered(where, before)
    prompt = _encoded(where, text, reading, special=False)
    tokens, marks = list(prompt), list[int]()
    for place in own:
        if not is_said(after[place]):
            raise UserError(f"{where}: a message of the assistant is empty: write it, or remove the row")
        opened = reading.rendered(where, [*before, *after[:place]])
        closed = reading.rendered(where, [*before, *after[: place + 1]], answers=False)
        if not (opened.startswith(text) and closed.startswith(opened)):
            why = (
                "does not only add to what it writes of the earlier messages, so a turn cannot be told from the others"
            )
            if len(own) == 1 and opened.startswith(text):
                why = f"begins an answer with {opened[-20:]!r}, and writes a given one in another way"
            other = "set data.turns=last, or " if len(own) > 1 and reading.marks else ""
            raise UserError(f"{where}: the chat template {why}: {other}give data.chat_template=FILE")
        between = _continued(text, tokens, opened[len(text) :], reading, special=False) if opened != text else []
        said = _continued(opened, [*tokens, *between], closed[len(opened) :], reading, special=False)
        kept = up_to_end(said, reading.tokenizer, reading.eos_ids)
        marks += [0] * len(between) + [int(is_learned(where, after[place]))] * len(kept)
        tokens += between + kept
        if place < last:  # what the template writes behind an end of sequence belongs to no turn
            marks += [0] * (len(said) - len(kept))
            tokens += said[len(kept) :]
        text = closed
    ended = _ended(tokens, reading)
    return start, prompt, ended[len(prompt) :], marks + [1] * (len(ended) - len(tokens))


# ---- tokens ---------------------------------------------------------------------------------------------------------


def _encoded(where: str, text: str, reading: Reading, *, special: bool) -> list[int]:
    tokens = reading.tokenizer.encode(text, special=special)
    if not tokens:
        raise UserError(f"{where}: the tokenizer makes no token from the prompt {text!r}: remove the entry")
    return tokens


def _continued(before: str, tokens: list[int], text: str, reading: Reading, *, special: bool = True) -> list[int]:
    """Returns the tokens of a text that follows another one, whose tokens stay as they are."""
    tokenizer = reading.tokenizer
    joined = tokenizer.encode(before + text, special=special)
    if joined[: len(tokens)] == tokens:
        return joined[len(tokens) :]
    alone = tokenizer.encode(text, special=special)
    return alone[1:] if alone and alone[0] == tokenizer.bos_token_id else alone


def up_to_end(tokens: list[int], tokenizer: Tokenizer, eos_ids: Sequence[int]) -> list[int]:
    """Returns a turn without the white space that a chat template writes after its end of sequence."""
    places = [place for place, token in enumerate(tokens) if token in eos_ids]
    if not places or tokenizer.decode(tokens[places[-1] + 1 :]).strip():
        return tokens
    return tokens[: places[-1] + 1]


def _ended(tokens: list[int], reading: Reading) -> list[int]:
    """Appends the first of the ends of sequence (Tokenizer.eos_ids), if there is none."""
    if not reading.eos_ids or (tokens and tokens[-1] in reading.eos_ids):
        return tokens
    return [*tokens, reading.eos_ids[0]]


def _common(one: Sequence[T], other: Sequence[T]) -> list[T]:
    """Returns what two texts or conversations have in common at their beginning."""
    return [mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
