"""The draw subcommand: maps of which rank runs which call under some strategies, and timelines of their forecasts.

One process; needs neither torch nor MPI.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_spmd.command_line.fitting_strategies import compile_all, missing_bytes
from rlhf_spmd.command_line.outputs import check_out, save
from rlhf_spmd.command_line.plans import OVERLAP
from rlhf_spmd.command_line.words import read
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.files.output import print_json, table_width
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import bubble
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.text.program_listing import format_bytes, table

MOST_LANES = 16  # of all timelines together; with more ranks, those that do the same share a lane


def run(parsed: argparse.Namespace) -> int:
    """Draws the picture and prints a table and a line of JSON -> the exit status. Raises UserError."""
    out = check_out(parsed, ".png")
    config, cluster, calibration = read(parsed, required=parsed.only != "map")
    programs = compile_all(parsed.strategies, make_workload(config), cluster, config.strategy)
    forecasts: dict[str, Forecast] = {}
    by = ""
    if parsed.only != "map" and calibration is not None:  # which then is required
        forecasts = {name: forecast(program, calibration) for name, program in programs.items()}
        by = f"forecast with calibration {calibration.name}"
    drawn = Path(parsed.strategies[0]).stem if len(programs) == 1 else f"{len(programs)} strategies"
    title = f"{drawn}, preset {config.title} on {cluster}"
    maps = parsed.only != "timelines"
    save(out, lambda path: picture_of(programs, forecasts, title=title, maps=maps, by=by).save(path))
    print(forecast_table(programs, forecasts, table_width()))
    seconds = {name: made.makespan_s for name, made in forecasts.items()}
    chains = {name: program.chains for name, program in programs.items()}
    values = {"out": str(out), "strategies": list(programs), "forecast_s": seconds or None, "chain": chains}
    print_json(values | {"ok": True}, parsed.json)
    return 0


def picture_of(
    programs: Mapping[str, Program], forecasts: Mapping[str, Forecast], *, title: str, maps: bool, by: str
) -> Any:
    """Returns a Picture: maps, if wanted, above the timelines of the forecasts, if there are any.

    by: the source of the forecasts.
    """
    from rlhf_spmd.runtime.pictures.forecast_spans import spans_of_forecast
    from rlhf_spmd.runtime.pictures.palette import styles_of
    from rlhf_spmd.runtime.pictures.picture import Picture
    from rlhf_spmd.runtime.pictures.placement_map import Map, add_maps
    from rlhf_spmd.runtime.pictures.timeline import Panel, add_stack

    workflow = next(iter(programs.values())).workload.workflow
    picture = Picture()
    legend = "Maps: which rank runs which call, one iteration from top to bottom. " * maps
    picture.title(title, (legend + f"Timelines: {by}." * bool(forecasts)).strip())
    if maps:
        add_maps(picture, [Map(Path(name).stem, program) for name, program in programs.items()])
    if forecasts:
        panels = [
            Panel(Path(name).stem, spans_of_forecast(made), note(made.program, f", one every {made.makespan_s:.3g} s"))
            for name, made in forecasts.items()
        ]
        add_stack(picture, panels, styles=styles_of(workflow), most_lanes=MOST_LANES)
    return picture


def note(program: Program, more: str = "") -> str:
    """Returns notes on a program: whether its iterations overlap (then followed by `more`), and what it lacks."""
    missing, notes = missing_bytes(program), [OVERLAP + more] if program.chains else []
    return ", ".join([*notes, f"does not fit: a device lacks {format_bytes(missing)}"] if missing > 0 else notes)


def forecast_table(
    programs: Mapping[str, Program], forecasts: Mapping[str, Forecast], columns: int | None = None
) -> str:
    """Returns the forecast of each program, if there is one, in numbers. columns: of `table`."""
    rows: list[tuple[str, ...]] = [("strategy", "seconds", "bubble", "note")]
    for name, program in programs.items():
        seconds = ("-", "-")
        if name in forecasts:
            seconds = (f"{forecasts[name].makespan_s:.4g}", f"{abs(bubble(forecasts[name])):.0%}")
        rows.append((name, *seconds, note(program)))
    return table(rows, columns)
