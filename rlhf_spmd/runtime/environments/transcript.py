"""The turns of an episode as text, from the tokens of its row and those of them that were drawn."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from rlhf_spmd.model.texts.tool_calls import Call
from rlhf_spmd.model.texts.turns import MARK, answer_of
from rlhf_spmd.runtime.environments.renderer import Renderer

Turn = dict[str, str | list[str]]  # model: what it says beside calls; calls; answers, which the last turn may lack


def transcript(renderer: Renderer, token_ids: Sequence[int], drawn: Sequence[bool]) -> list[Turn]:
    """Returns the turns of an episode. token_ids: of its response. drawn: which of them the model drew."""
    turns: list[Turn] = []
    said: list[int] = []
    calls: list[Call] = []
    for is_drawn, ids in _parts(token_ids, drawn):
        if is_drawn:
            said = ids
            words, calls = renderer.parse(said, is_first=not turns)
            is_read = bool(calls) and not any(call.error for call in calls)
            written = [_written(call) for call in calls] if is_read else []
            turns.append(
                {"model": (words if is_read else renderer.text_of(said)).strip(), "calls": written, "answers": []}
            )
        elif turns:
            turns[-1]["answers"] = _answers(renderer, said, ids, calls)
    return turns


def _parts(token_ids: Sequence[int], drawn: Sequence[bool]) -> Iterator[tuple[bool, list[int]]]:
    """Yields the tokens of turns and, between them, those of answers."""
    for is_drawn, part in groupby(zip(drawn, token_ids, strict=True), key=lambda pair: bool(pair[0])):
        yield is_drawn, [token for _, token in part]


def _written(call: Call) -> str:
    return f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})"


def _answers(renderer: Renderer, said: Sequence[int], ids: Sequence[int], calls: Sequence[Call]) -> list[str]:
    """Returns what came back, without what the chat template writes around it, as far as that can be told."""
    text, around = renderer.tokenizer.decode(ids, special=True), _around(renderer, said, calls)
    found = re.fullmatch(around, text, re.DOTALL) if around else None
    return [one.strip() for one in found.groups()] if found else [renderer.tokenizer.decode(ids).strip()]


def _around(renderer: Renderer, said: Sequence[int], calls: Sequence[Call]) -> str:
    """Returns a regular expression of what follows a turn, with a group for each answer; empty: there is none to
    tell."""
    if renderer.environment.speaks == "text":
        return ""
    back = [answer_of("tool", MARK, call.name or "unknown", call.number) for call in calls] or [answer_of("user", MARK)]
    ids = renderer.joins.after(said, back, [call.message for call in calls])
    parts = renderer.tokenizer.decode(ids, special=True).split(MARK)
    return "(.*?)".join(map(re.escape, parts)) if len(parts) == len(back) + 1 else ""
