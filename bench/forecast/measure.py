"""`python -m bench scan --measure`: the strategies for real, on the devices of the MPI world that it was started in.

Every rank comes here. Each strategy trains for a few iterations with its default options, one after another in one
world; the seconds of the slowest rank count, without those of the first iteration.
"""

import json
import sys

from bench.rows import STRATEGIES, write
from bench.tables import text_table
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import DEVICE_BYTES, Cluster, Node
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.program.transfers import communicators

MEASURED = tuple(name for name in STRATEGIES if name != "planner")


def read_preset(name: str) -> Config:
    """The configuration of a preset that has weights. Raises UserError for one that has none."""
    config = presets.load(name, ["num_samples=0"])
    if not config.main_folder:
        with_weights = [preset for preset in presets.PRESETS if presets.load(preset).main_folder]
        raise UserError(
            f"preset {name} has no weights, so it can be forecast and not measured; leave --measure out, or give "
            f"--preset {' or '.join(with_weights)}"
        )
    return config


def programs(config: Config, cluster: Cluster) -> dict[str, Program | str]:
    """By strategy: its program, or why it cannot run here."""
    workload, found = make_workload(config), {}
    for name in MEASURED:
        try:
            found[name] = load_strategy(name).compile(workload, cluster, {})
        except UserError as error:
            found[name] = str(error)
    return found


def measure(preset: str) -> int:
    """What each rank does; rank 0 prints and writes the rows."""
    try:
        config = read_preset(preset)
    except UserError as error:
        print(f"bench scan: error: {error}", file=sys.stderr)
        return 2
    from rlhf_spmd.runtime.world.world import World
    from rlhf_spmd.verbs.plan import iteration_s

    world = World.discover()
    world.use_device("auto")
    rows = []
    try:
        device = "cpu" if world.computes.index is None else config.device_type
        sizes = [world.nodes.count(node) for node in range(world.num_nodes)]
        cluster = Cluster(tuple(Node(size, device, DEVICE_BYTES[device]) for size in sizes))
        cases = programs(config, cluster)
        compiled = {name: program for name, program in cases.items() if isinstance(program, Program)}
        world.start_torch(*communicators(compiled.values()))
        for name, program in cases.items():
            row = {"bench": "scan-measured", "preset": preset, "layout": str(cluster), "strategy": name}
            if name not in compiled:
                rows.append(row | {"samples_per_s": None, "iteration_s": None, "why_not": program})
                continue
            seconds = iteration_s(config, program, world)
            rate = program.workload.num_sequences / seconds
            rows.append(row | {"samples_per_s": rate, "iteration_s": seconds, "why_not": ""})
        world.shutdown()
    except BaseException as error:
        world.fail(error)
    if world.rank == 0:
        base_s = rows[0]["iteration_s"]
        for row in rows:
            row["speed_up"] = base_s / row["iteration_s"] if base_s and row["iteration_s"] else None
        print(text_table("scan_measured", rows))
        write("scan_measured", rows)
        print(json.dumps({"bench": "scan", "measured": len(compiled), "ok": bool(compiled)}))
    return 0
