"""The colours of all pictures: one palette per meaning. No model, call or strategy is named here.

A model has a hue, by its number in the workflow; the kind of a call is a shade of the hue. Spans without computation
are grey. Strategies, systems, ranks and phases have palettes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from colorsys import hsv_to_rgb
from typing import NamedTuple

from rlhf_spmd.plan.workflow import Call, Compute, Infer, Measure, Workflow

INK, FAINT_INK, RULE, PAPER = "#22262e", "#69707c", "#d3d7de", "#ffffff"
MODELS = ("#3576bd", "#3f9b6c", "#8d5ab5", "#e0812f", "#1f9aa8", "#cf5f8c", "#8c6a4a", "#9c9a2e")
STRATEGIES = ("#8b93a1", "#45b8c4", "#0f6577", "#c2407e", "#8aa02c", "#34307a", "#7a4a2b", "#d9b43c")
SYSTEMS = ("#2f6f4f", "#a8442a", "#b08a1e", "#3b5b92")  # published measurements
RUNS = ("#3576bd", "#d2622a", "#2f8f5b", "#8d5ab5", "#b8901c", "#1f9aa8", "#cf5f8c", "#6b4a35")
RANKS = ("#fde0a6", "#f3a683", "#b6688e", "#5d4a83", "#c9d6a3", "#7fb3a5", "#3d7f93", "#2c4a6e")
PROMISE = "#b3372f"  # limits and promises
IDLE = "#e7e9ed"  # the background where nothing runs
KINDS = ("generate", "infer", "train")  # from the first to the last in an iteration
NEUTRAL = "#5f6c84"  # the hue of calls without a model


class Style(NamedTuple):
    """The look of a span, and its label in the legend."""

    label: str
    colour: str
    hatch: str = ""
    edge: str = PAPER
    ink: str = PAPER  # of text on it
    words: tuple[str, ...] = ()  # text on it: the first of these that fits


WAITING = Style("waiting for other ranks", PAPER, hatch="/////", edge="#aab0bb")
CONTROL = Style("control messages", "#b3b9c4")
TRANSFER = Style("transfer", INK)
SPANS = {"transfer": TRANSFER, "wait": WAITING, "control": CONTROL}  # by their category
IDLE_STYLE = Style("idle", IDLE)


def run_colours(number: int) -> list[str]:
    """Returns a colour for each of so many runs: those of the palette, then hues at the golden angle."""
    more = (hsv_to_rgb(0.618034 * index % 1.0, 0.65, 0.7) for index in range(len(RUNS), number))
    return [*RUNS[:number], *("#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in more)]


def mix(colour: str, other: str, share: float) -> str:
    """Mixes a colour with this share of another one."""
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def shade(hue: str, kind: str) -> str:
    """Returns the shade of a model's hue for a kind of call: inference is light, training dark."""
    if kind == "infer":
        return mix(hue, "#ffffff", 0.56)
    return mix(hue, "#000000", 0.42) if kind == "train" else hue


def styles_of(workflow: Workflow) -> dict[str, Style]:
    """Returns the style of each call, the same for all calls of one model and kind. In the legend's order: by model,
    each from generation to training, then calls without a model."""
    order = {model: number for number, model in enumerate(workflow.models)}

    def place(call: Call) -> tuple[int, int]:
        if isinstance(call, Compute):
            return len(order), len(KINDS)
        return order[call.model], KINDS.index(call.kind)

    return {call.name: _style_of(call, order) for call in sorted(workflow.calls, key=place)}


def style_of_span(name: str, category: str, models: Sequence[str]) -> Style:
    """Returns the style of a span where only the names of calls are known. models: in the order of their hues."""
    if category in SPANS:
        return SPANS[category]
    kind = kind_of_name(name)
    if not kind or model_of_name(name) not in models:
        return other(name)
    hue = MODELS[models.index(model_of_name(name)) % len(MODELS)]
    return Style(f"{model_of_name(name)} {kind}", shade(hue, kind))


def kind_of_name(name: str) -> str:
    """Returns the kind of a call by its name, such as generate of actor_generate_greedy; empty if the name has none."""
    return next((word for word in name.split("_")[1:] if word in KINDS), "")


def model_of_name(name: str) -> str:
    """Returns the model of a call by its name."""
    return name.partition(f"_{kind_of_name(name)}")[0]


def _style_of(call: Call, order: dict[str, int]) -> Style:
    if isinstance(call, Compute):
        return other(call.name)
    label = f"{call.model} {call.kind}"
    ink = INK if isinstance(call, Infer | Measure) else PAPER
    return Style(
        label,
        shade(MODELS[order[call.model] % len(MODELS)], call.kind),
        ink=ink,
        words=(label, f"{call.model}\n{call.kind}"),
    )


def other(name: str) -> Style:
    """Returns the style of a computation without a model."""
    label = name.replace("_", " ")
    return Style(label, NEUTRAL, words=(label,))
