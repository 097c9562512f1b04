"""The colours of all pictures: one palette per meaning. No model, call or strategy is named here.

A model has a hue, by its number in the workflow; the kind of a call is a shade of the hue. Spans without computation
are grey. Strategies, systems, ranks and phases have palettes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb

from rlhf_spmd.plan.calls import Compute, Workflow

INK, FAINT_INK, RULE, PAPER = "#22262e", "#69707c", "#d3d7de", "#ffffff"
MODELS = ("#3576bd", "#3f9b6c", "#8d5ab5", "#e0812f", "#1f9aa8", "#cf5f8c", "#8c6a4a", "#9c9a2e")
STRATEGIES = ("#8b93a1", "#45b8c4", "#0f6577", "#c2407e", "#8aa02c", "#34307a", "#7a4a2b", "#d9b43c")
SYSTEMS = ("#2f6f4f", "#a8442a", "#b08a1e", "#3b5b92")  # published measurements
RUNS = ("#3576bd", "#d2622a", "#2f8f5b", "#8d5ab5", "#b8901c", "#1f9aa8", "#cf5f8c", "#6b4a35")
RANKS = ("#fde0a6", "#f3a683", "#b6688e", "#5d4a83", "#c9d6a3", "#7fb3a5", "#3d7f93", "#2c4a6e")
IDLE = "#e7e9ed"  # the background where nothing runs
KINDS = ("generate", "infer", "train")  # from the first to the last in an iteration
NEUTRAL = "#5f6c84"  # the hue of calls without a model


class Style(NamedTuple):
    """The look of a span, and its label in the legend and on it."""

    label: str
    colour: str
    hatch: str = ""
    edge: str = PAPER
    ink: str = PAPER  # of text on it


WAITING = Style("waiting for other ranks", PAPER, hatch="/////", edge="#aab0bb")
CONTROL = Style("control messages", "#b3b9c4")
TRANSFER = Style("transfer", INK)
SPANS = {"control": CONTROL, "transfer": TRANSFER, "wait": WAITING}  # by their category
IDLE_STYLE = Style("idle", IDLE)


def run_colours(number: int) -> list[str]:
    """Returns a colour for each of so many runs: those of the palette, or as many hues as it takes."""
    if number <= len(RUNS):
        return list(RUNS[:number])
    return [to_hex(colormaps["turbo"](index / (number - 1))) for index in range(number)]


def mix(colour: str, other: str, share: float) -> str:
    """Mixes a colour with this share of another one."""
    pairs = zip(to_rgb(colour), to_rgb(other), strict=True)
    return to_hex([a + (b - a) * share for a, b in pairs])


def shade(hue: str, kind: str) -> str:
    """Returns the shade of a model's hue for a kind of call: inference is light, training dark."""
    if kind == "infer":
        return mix(hue, "#ffffff", 0.56)
    return mix(hue, "#000000", 0.42) if kind == "train" else hue


def styles_of(workflow: Workflow) -> dict[str, Style]:
    """Returns the style of each call, the same for all calls of one model and kind. In the legend's order: by model,
    each from generation to training, then calls without a model."""
    models = list(workflow.models)
    calls = [call for call in workflow.calls if not isinstance(call, Compute)]
    calls.sort(key=lambda call: (models.index(call.model), KINDS.index(call.kind)))
    styles = {call.name: _style(models.index(call.model), call.model, call.kind) for call in calls}
    return styles | {call.name: other(call.name) for call in workflow.calls if isinstance(call, Compute)}


def styles_of_names(names: Iterable[str]) -> dict[str, Style]:
    """Returns the style of each call of which only the name is known, such as actor_generate_greedy. names: in the
    order of a run, by which models get their hues."""
    styles, models = {}, []
    for name in names:
        if match := re.match(rf"(.+?)_({'|'.join(KINDS)})(_|$)", name):
            model, kind, _ = match.groups()
            if model not in models:
                models.append(model)
            styles[name] = _style(models.index(model), model, kind)
    return styles


def other(name: str) -> Style:
    """Returns the style of a computation without a model."""
    return Style(name.replace("_", " "), NEUTRAL)


def _style(number: int, model: str, kind: str) -> Style:
    hue = MODELS[number % len(MODELS)]
    return Style(f"{model} {kind}", shade(hue, kind), ink=INK if kind == "infer" else PAPER)
