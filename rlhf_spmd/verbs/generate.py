"""The generate verb on the ranks of an MPI world: compares its options among the ranks, then generates."""

import argparse
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import read_config_json
from rlhf_spmd.plan.layout import Layout, group_name
from rlhf_spmd.runtime.offline.options import check_options, load_options


def run(world, parsed: argparse.Namespace) -> None:
    """Reads and compares the options, starts torch and generates. Raises UserError."""
    given = {name: getattr(parsed, name) for name in ("tp", "dtype", "seed")}
    words = [f"{name}={value}" for name, value in given.items() if value is not None] + parsed.overrides
    with world.together("reading the options"):
        options = load_options(words)
        check_options(options)
        layout = Layout.grid_of(range(world.size), tp=options.tp)
        if world.size % options.tp:
            raise UserError(f"--tp {options.tp} does not divide the {world.size} ranks; change one of them")
        num_heads = read_config_json(Path(parsed.model) / "config.json").num_kv_heads
        if options.tp > num_heads:
            raise UserError(
                f"--tp {options.tp} is more than the {num_heads} key-value heads of {parsed.model}; lower it"
            )
    files = {name: str(getattr(parsed, name)) for name in ("model", "prompts", "out", "overwrite")}
    with world.together("comparing the options"):
        world.agree("the start", files | {"options": repr(options)})
    world.set_deadline(options.deadline_s)
    world.use_device(options.device)
    groups = {group_name(layout.tensor_ranks(rank)): layout.tensor_ranks(rank) for rank in layout.ranks}
    world.start_torch(groups)

    from rlhf_spmd.runtime.offline.generate_file import generate_file  # torch, which start_torch has prepared for

    generate_file(
        world, layout, options, model=parsed.model, prompts=parsed.prompts, out=parsed.out, overwrite=parsed.overwrite
    )
