"""Timelines of a case in which separation is slower, drawn from committed rows by `python -m tools pictures`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.verbs.draw import picture_of

BEHIND = "llama-13b", "4x8", ("separation", "flattening")  # the case, and the strategies that are drawn


def behind(rows: Sequence[Mapping], path: Path) -> Path:
    """Draws the timelines of separation and of a faster strategy, with the options that the rows of the scan have."""
    preset, layout, strategies = BEHIND
    workload, calibration = make_workload(load(preset)), load_calibration("a100-80g")
    programs = {}
    for row in rows:
        if (row["preset"], row["layout"]) == (preset, layout) and row["strategy"] in strategies:
            options = {name: tuple(one) if isinstance(one, list) else one for name, one in row["options"].items()}
            cluster = Cluster.parse(layout, calibration.name)
            programs[row["strategy"]] = load_strategy(row["strategy"]).compile(workload, cluster, options)
    programs = {name: programs[name] for name in strategies}
    forecasts = {name: forecast(program, calibration) for name, program in programs.items()}
    title = f"Why can separation be slower? {preset} on {layout}"
    picture_of(programs, forecasts, title=title, maps=False, by=f"forecast by calibration {calibration.name}").save(
        path
    )
    return path
