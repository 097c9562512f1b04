"""Pictures that explain: workflow and strategy as a program, weights between two layouts, a killed job that goes on.

They are drawn from what the code computes: a recorded workflow, a compiled program, a planned reallocation.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.program.instructions import Post, Program, Run
from rlhf_spmd.plan.program.reallocate import Reallocation
from rlhf_spmd.plan.program.tensors import Box
from rlhf_spmd.plan.workflow import Workflow
from rlhf_spmd.runtime.pictures.palette import (
    FAINT_INK,
    IDLE,
    INK,
    NEUTRAL,
    PROMISE,
    RANKS,
    RULE,
    Style,
    mix,
    shade,
    styles_of,
)
from rlhf_spmd.runtime.pictures.picture import SMALL, TEXT, WIDTH, Area, Picture
from tests.reallocations import lower_bound_bytes

USES = {
    "executed": "every rank carries out its\nlist, on CPUs or GPUs",
    "checked": "its schedule cannot deadlock,\nthe devices have the memory",
    "simulated": "seconds of an iteration,\nwhich the planner compares",
    "drawn": "as a map and a timeline,\nbefore a run or after it",
}
WEIGHT = "layers.{}.self_attn.q_proj.weight"  # whose boxes are drawn, for all weights


def canvas(area: Area, height: float) -> Axes:
    """Returns axes over the whole width; coordinates are inches from the left and the top."""
    axes = area.axes(0, 0, WIDTH, height)
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    return axes


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, **looks) -> None:
    """Draws a rectangle with round corners."""
    shape = f"round,pad=0,rounding_size={looks.pop('rounding', 0.06)}"
    looks = {"linewidth": 0, "zorder": 2} | looks
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=colour, **looks))


def frame(axes: Axes, x: float, y: float, width: float, height: float, title: str, about: str = "") -> None:
    """Draws a box with a heading."""
    box(axes, x, y, width, height, "white", edgecolor=RULE, linewidth=1.2, zorder=1, rounding=0.08)
    axes.text(x + 0.12, y + 0.19, title, fontsize=TEXT, fontweight="bold", color=INK, va="center")
    axes.text(x + width - 0.1, y + 0.19, about, fontsize=SMALL, color=FAINT_INK, va="center", ha="right")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK, **looks) -> None:
    looks = {"linewidth": 1.1, "shrinkA": 0, "shrinkB": 0, "zorder": 4, "mutation_scale": 9} | looks
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", color=colour, **looks))


def words(axes: Axes, x: float, y: float, text: str, **looks) -> None:
    axes.text(x, y, text, **({"fontsize": SMALL, "color": INK, "va": "center", "zorder": 5} | looks))


# ---- workflow + strategy -> program ----------------------------------------------------------------------------------


def program_picture(path: Path) -> Path:
    """Draws how workflow and strategy compile to a program, which has four uses."""
    program = load_strategy("separation").compile(make_workload(load("tiny")), Cluster.parse("1x4"), {})
    picture = Picture()
    picture.title("Workflow + strategy = program", "What to compute, and where; the same program has four uses.")

    def part(area: Area) -> None:
        axes, styles = canvas(area, 3.75), styles_of(program.workload.workflow)
        frame(axes, 0.15, 0.05, 3.3, 2.05, "Workflow", "the algorithm, here PPO")
        _workflow(axes, 0.15, 0.4, 3.3, program.workload.workflow, styles)
        frame(axes, 0.15, 2.3, 3.3, 1.4, "Strategy", "who runs what, here separation")
        _map(axes, 0.3, 2.66, program, styles)
        frame(axes, 3.82, 0.05, 2.22, 3.65, "Program", "a list per rank")
        _lists(axes, 3.92, 0.4, program, styles)
        for y in (1.07, 3.0):
            arrow(axes, (3.47, y), (3.81, y), linewidth=1.6, mutation_scale=12)
        for index, (use, about) in enumerate(USES.items()):
            top = 0.05 + index * 0.935
            frame(axes, 6.42, top, 1.93, 0.845, use)
            words(axes, 6.54, top + 0.54, about, linespacing=1.35)
            arrow(axes, (6.06, top + 0.42), (6.41, top + 0.42), linewidth=1.6, mutation_scale=12)

    picture.add(3.75, part)
    picture.save(path)
    return path


def depths(workflow: Workflow) -> dict[str, int]:
    """Returns, for each call, the longest way to it from the calls that need nothing of others."""
    found: dict[str, int] = {}
    for call in workflow.calls:
        makers = (workflow.producer(key) for key in call.inputs)
        found[call.name] = max((found[maker.name] + 1 for maker in makers if maker), default=0)
    return found


def _workflow(
    axes: Axes, left: float, top: float, width: float, workflow: Workflow, styles: Mapping[str, Style]
) -> None:
    """Draws the calls; those that do not depend on each other are in one line."""
    lines: dict[int, list[str]] = {}
    depth = depths(workflow)
    for name, line in depth.items():
        lines.setdefault(line, []).append(name)
    at, wide, high = {}, 0.9, 0.23
    for line, names in lines.items():
        for index, name in enumerate(names):
            at[name] = left + width * (index + 0.5) / len(names), top + 0.15 + line * 0.44
    for call in workflow.calls:
        (x, y), style = at[call.name], styles[call.name]
        mine = max(wide, 0.058 * len(style.label) + 0.14)
        box(axes, x - mine / 2, y - high / 2, mine, high, style.colour, zorder=3)
        words(axes, x, y, style.label, color=style.ink, ha="center", va="center_baseline")
        for maker in dict.fromkeys(maker for key in call.inputs if (maker := workflow.producer(key))):
            if depth[call.name] == depth[maker.name] + 1:  # the others follow
                (from_x, from_y), ends = at[maker.name], (y - high / 2 - 0.01)
                arrow(axes, (from_x, from_y + high / 2), (x, ends), FAINT_INK, linewidth=0.9, mutation_scale=7)


def _map(axes: Axes, left: float, top: float, program: Program, styles: Mapping[str, Style]) -> None:
    """Draws a map of calls x ranks."""
    calls = program.workload.workflow.placed_calls
    wide, high = 0.26, 0.135
    for row, call in enumerate(calls):
        for rank in program.cluster.ranks:
            runs = rank in program.placement.layouts[call.name].ranks
            colour = styles[call.name].colour if runs else IDLE
            corner = left + 0.02 + rank * wide, top + row * high
            axes.add_patch(Rectangle(corner, wide - 0.03, high - 0.025, facecolor=colour))
    for rank in program.cluster.ranks:
        words(axes, left + (rank + 0.5) * wide, top + len(calls) * high + 0.08, str(rank), color=FAINT_INK, ha="center")
    words(axes, left + 4 * wide + 0.05, top + len(calls) * high + 0.08, "rank", color=FAINT_INK)
    for index, (names, about) in enumerate(_parts(program).items()):
        words(axes, left + 4 * wide + 0.15, top + 0.2 + index * 0.42, f"ranks {names}: {about}")


def _parts(program: Program) -> dict[str, str]:
    """Returns the kinds of calls that ranks run."""
    kinds: dict[str, list[int]] = {}
    for rank in program.cluster.ranks:
        mine = [c for c in program.workload.workflow.placed_calls if rank in program.placement.layouts[c.name].ranks]
        kinds.setdefault(" and ".join(dict.fromkeys(call.kind for call in mine)), []).append(rank)
    return {format_ranks(tuple(ranks)): about for about, ranks in kinds.items()}


def _lists(axes: Axes, left: float, top: float, program: Program, styles: Mapping[str, Style]) -> None:
    """Draws the first instructions of the first and of the last rank."""
    wide, high = 0.99, 0.226
    for column, rank in enumerate((0, program.cluster.ranks[-1])):
        x = left + column * (wide + 0.04)
        words(axes, x + wide / 2, top + 0.06, f"rank {rank}", color=FAINT_INK, ha="center")
        for row, (label, style) in enumerate(_chips(program, rank, styles)[:13]):
            y = top + 0.2 + row * high
            box(axes, x, y, wide, high - 0.035, style.colour if style else IDLE, rounding=0.04)
            ink = style.ink if style else INK
            words(axes, x + wide / 2, y + high / 2 - 0.018, label, color=ink, ha="center", va="center_baseline")
        words(axes, x + wide / 2, top + 0.2 + 13 * high + 0.03, "…", ha="center", color=FAINT_INK)


def _chips(program: Program, rank: int, styles: Mapping[str, Style]) -> list[tuple[str, Style | None]]:
    """Returns a rank's instructions in a word or two, the same neighbours once."""
    found: list[tuple[str, Style | None]] = []
    for step in program.instructions[rank]:
        if isinstance(step, Run):
            style = styles[step.call]
            chip = style.label.removeprefix("estimate "), style
        elif hasattr(step, "transfer"):
            sends = bool(program.transfers[step.transfer].sent_by(rank))
            verb = "sending" if sends else "receiving"
            chip = (f"start {verb}" if isinstance(step, Post) else "wait for it"), None
        else:
            chip = str(step).lower(), None
        if not found or found[-1] != chip:
            found.append(chip)
    return found


# ---- weights between two layouts -------------------------------------------------------------------------------------


def weights_picture(path: Path) -> Path:
    """Draws which rank sends which box of the actor's weights to which, from its layout in training to that in
    generation."""
    options = {"training_tp": 2, "training_pp": 2, "generation_tp": 2}
    program = load_strategy("reallocation").compile(make_workload(load("llama-7b")), Cluster.parse("1x4"), options)
    workflow, layouts = program.workload.workflow, program.placement.layouts
    generate = workflow.generate_calls[0]
    train = workflow.train_call(generate.model)
    plan = next(t.reallocation for t in program.transfers if t.reallocation and t.model == generate.model)
    picture = Picture()
    gib = plan.num_bytes / 2**30
    picture.title(
        f"Weights of the {generate.model} from training to generation",
        f"llama-7b on 4 ranks, planned by the reallocation strategy: {gib:.1f} GiB travel, which is the least possible."
        if plan.num_bytes == lower_bound_bytes(plan) else f"llama-7b on 4 ranks: {gib:.1f} GiB travel.",
    )  # fmt: skip

    def part(area: Area) -> None:
        axes = canvas(area, 3.65)
        words(axes, 1.55, 0.1, f"training: {layouts[train.name]}", fontweight="bold", fontsize=TEXT)
        words(axes, 5.55, 0.1, f"generation: {layouts[generate.name]}", fontweight="bold", fontsize=TEXT)
        _tiles(axes, plan)
        words(axes, 1.0, 3.45, "A frame: all layers (down) and columns (across). Each rank keeps its box and gets what "
              "it lacks.", color=FAINT_INK)  # fmt: skip

    picture.add(3.65, part)
    picture.save(path)
    return path


def _tiles(axes: Axes, plan: Reallocation) -> None:
    """Draws rows of ranks: what each holds before and after, and who sends it the rest."""
    weight = plan.weights[WEIGHT]
    wide, high, left, right = 1.6, 0.66, 1.55, 5.55
    tops = {rank: 0.28 + index * 0.77 for index, rank in enumerate(plan.ranks)}
    middles: dict[tuple[float, int, Box], tuple[float, float]] = {}

    def fill(x: float, rank: int, part: Box, owner: int) -> None:
        (l0, l1), (r0, r1), _ = part
        layers, rows = weight.layers, weight.rows
        corner = x + wide * r0 / rows, tops[rank] + high * l0 / layers
        size = wide * (r1 - r0) / rows, high * (l1 - l0) / layers
        axes.add_patch(Rectangle(corner, *size, facecolor=_ranks(owner), edgecolor="white", linewidth=1.0, zorder=2))
        middles[x, rank, part] = corner[0] + size[0] / 2, corner[1] + size[1] / 2
        words(axes, *middles[x, rank, part], f"rank {owner}", color=INK if owner < 2 else "white", ha="center",
              va="center_baseline")  # fmt: skip

    for rank in plan.ranks:
        words(axes, left - 0.15, tops[rank] + high / 2, f"rank {rank}", ha="right", fontsize=TEXT)
        words(axes, right + wide + 0.15, tops[rank] + high / 2, f"rank {rank}", fontsize=TEXT)
        for x in (left, right):
            axes.add_patch(Rectangle((x, tops[rank]), wide, high, facecolor=IDLE, linewidth=0, zorder=1))
    for rank, holding in plan.sources:
        for part in holding.boxes(weight):
            fill(left, rank, part, rank)
    for copy in plan.local:
        if copy.piece.weight == WEIGHT:
            rank = plan.targets[copy.target][0]
            fill(right, rank, copy.piece.box, rank)
    for route in plan.routes:
        parts = [piece.box for piece in route.pieces if piece.weight == WEIGHT]
        for taker in route.ranks[1:]:
            for part in parts:
                fill(right, taker, part, route.ranks[0])
        for sender, taker in route.hops:
            start, end = (left + wide + 0.05, tops[sender] + high / 2), (right - 0.05, tops[taker] + high / 2)
            arrow(axes, start, end, mix(_ranks(route.ranks[0]), "#000000", 0.2), linewidth=2.0, mutation_scale=13)
            share = 0.14
            x, y = start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])
            size = route.num_numbers * plan.bytes_per_number / 2**30
            words(axes, x, y, f"{size:.1f} GiB", ha="center",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2})  # fmt: skip


def _ranks(rank: int) -> str:
    return RANKS[rank % len(RANKS)]


# ---- kill -> checkpoint -> requeue -> resume -------------------------------------------------------------------------


def resume_picture(path: Path, rows: Sequence[Mapping]) -> Path:
    """Draws a job that is killed and goes on, below one that is not.

    rows: of bench faults, for what was measured.
    """
    points, equal = (sum(row[key] for row in rows) for key in ("points", "equal"))
    slowest_s = max(row["slowest_end_s"] for row in rows)
    picture = Picture()
    picture.title(
        "Killed, requeued, resumed: the same bits",
        f"Measured on CPUs: {equal} of {points} runs that were killed at a random moment ended like an uninterrupted "
        "one.",
    )

    def part(area: Area) -> None:
        axes = canvas(area, 3.05)
        _runs(axes)
        notes = (
            ("1  Checkpoint", "Threads write it while\ntraining goes on. It is\ncomplete or absent."),
            ("2  Kill", f"The job ends within {_up(slowest_s)} s.\nIts message names rank,\ncall and checkpoint."),
            ("3  Requeue", "Slurm starts the job\nagain (train.sbatch), or\nyou do (train --resume)."),
            ("4  Resume", "From the newest complete\ncheckpoint; what was lost\nis computed again."),
        )
        for index, (title, about) in enumerate(notes):
            x = 0.2 + index * 2.08
            words(axes, x, 2.33, title, fontweight="bold", fontsize=TEXT)
            words(axes, x, 2.48, about, linespacing=1.4, va="top")

    picture.add(3.05, part)
    picture.save(path)
    return path


def _up(seconds: float) -> str:
    """Rounds seconds up to tenths."""
    return f"{-(-seconds * 10 // 1) / 10:g}"


def _runs(axes: Axes) -> None:
    """Draws iterations as boxes, from 1: ten without a kill; below, the same with a kill in the sixth."""
    left, wide, high, every = 1.45, 0.43, 0.3, 2
    done, again, lost = shade(NEUTRAL, "generate"), shade(NEUTRAL, "train"), mix(PROMISE, "#ffffff", 0.55)
    rows = {"uninterrupted": 0.35, "killed": 1.35}

    def iteration(x: float, y: float, number: int, colour: str, width: float = wide, ink: str = "white") -> None:
        box(axes, x, y, width - 0.03, high, colour, rounding=0.03)
        words(axes, x + width / 2 - 0.015, y + high / 2, str(number + 1), color=ink, ha="center", va="center_baseline")

    def checkpoint(x: float, y: float) -> None:
        axes.plot([x], [y + high + 0.1], marker="s", ms=6, color=INK, zorder=5)

    for name, y in rows.items():
        words(axes, left - 0.15, y + high / 2, name, ha="right", fontsize=TEXT)
    for number in range(10):
        iteration(left + number * wide, rows["uninterrupted"], number, done)
        if number % every == 1:
            checkpoint(left + (number + 1) * wide - 0.015, rows["uninterrupted"])
    words(axes, left, 0.17, "iteration", color=FAINT_INK)
    y = rows["killed"]
    for number in range(5):
        iteration(left + number * wide, y, number, lost if number == 4 else done, ink=INK if number == 4 else "white")
        if number % every == 1:
            checkpoint(left + (number + 1) * wide - 0.015, y)
    killed = left + 5 * wide + 0.24
    iteration(killed - 0.24, y, 5, lost, 0.27, ink=INK)
    axes.plot([killed + 0.06], [y + high / 2], marker="X", ms=11, color=PROMISE, zorder=6, mec="white")
    start = killed + 0.75
    for number in range(4, 10):
        x = start + (number - 4) * wide
        iteration(x, y, number, again if number < 6 else done)
        if number % every == 1:
            checkpoint(x + wide - 0.015, y)
    newest = left + 4 * wide - 0.015
    arrow(axes, (newest + 0.05, y + high + 0.17), (start + 0.08, y + high + 0.03), connectionstyle="arc3,rad=0.28")
    end, low = start + 6 * wide - 0.2, rows["uninterrupted"] + high
    arrow(axes, (end, low), (end, (low + y) / 2 - 0.1), FAINT_INK)
    arrow(axes, (end, y - 0.03), (end, (low + y) / 2 + 0.1), FAINT_INK)
    words(axes, end, (low + y) / 2, "the same bits", ha="center", fontweight="bold", fontsize=TEXT)
    axes.plot([left + 10 * wide + 0.05, end], [low - high / 2] * 2, color=FAINT_INK, lw=1.1)
    axes.plot([end, end], [low - high / 2, low], color=FAINT_INK, lw=1.1)
    marks = {"1": (newest - 0.12, y + high + 0.24), "2": (killed + 0.06, y - 0.13), "3": (killed + 0.42, y + high / 2)}
    marks["4"] = start + 0.43, y - 0.13
    for mark, (x, at) in marks.items():
        words(axes, x, at, mark, fontweight="bold", ha="center", fontsize=TEXT)
    words(axes, start + 0.52, y - 0.13, "again", color=FAINT_INK)
    words(axes, left - 0.15, y + high + 0.14, "■ checkpoint", ha="right", color=FAINT_INK)
