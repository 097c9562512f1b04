"""The generate subcommand on the ranks of an MPI world: compares its options among the ranks, then generates."""

import argparse
from pathlib import Path

from rlhf_spmd.config.file import ConfigFile
from rlhf_spmd.config.presets import all_keys
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.output import print_json
from rlhf_spmd.model.adapters.uniform import BASE_HERE, model_files
from rlhf_spmd.model.config import read_config_json
from rlhf_spmd.pages.option_tree import Setting
from rlhf_spmd.plan.layout import Layout, group_name
from rlhf_spmd.runtime.offline.options import OPTIONS, check_options, load_options


def run(world, parsed: argparse.Namespace) -> None:
    """Reads and compares the options, starts torch and generates. Raises UserError."""
    given = {name: getattr(parsed, name) for name in ("tp", "dtype", "seed")}
    words = [f"{name}={value}" for name, value in given.items() if value is not None] + parsed.overrides
    with world.together("reading the options"):
        file = parsed.file or ConfigFile("")
        folder = parsed.model or file.words.get("model")
        if not folder:
            raise UserError(
                "--model is missing or empty: give --model FOLDER, or `model: FOLDER` in the file of --config"
            )
        options = load_options(words, settings_of(file))
        check_options(options)
        layout = Layout.grid_of(range(world.size), tp=options.tp)
        heads = read_config_json(Path(model_files(folder, option=BASE_HERE).folder) / "config.json").num_kv_heads
        if world.size % options.tp or options.tp > heads:
            raise UserError(
                f"--tp {options.tp} must divide {world.size} ranks, and be at most {heads} (key-value heads)"
            )
    files = {"model": folder} | {name: str(getattr(parsed, name)) for name in ("prompts", "out", "overwrite")}
    with world.together("comparing the options"):
        world.agree("the start", files | {"options": repr(options)})
    world.set_deadline(options.deadline_s)
    world.use_device(options.device)
    groups = {group_name(layout.tensor_ranks(rank)): layout.tensor_ranks(rank) for rank in layout.ranks}
    world.start_torch(groups)

    from rlhf_spmd.runtime.offline.generate_file import generate_file  # torch, which start_torch has prepared for

    result = generate_file(
        world, layout, options, model=folder, prompts=parsed.prompts, out=parsed.out, overwrite=parsed.overwrite
    )
    if world.rank == 0:
        print_json(result, parsed.json)


def settings_of(file: ConfigFile) -> list[Setting]:
    """Returns the settings of a file of --config without those that only a training run has, and without empty groups;
    of a run's own file those of `generate` alone, because its algorithm is not loaded."""
    if file.of_run:
        return [setting for setting in file.settings if setting.key in OPTIONS]
    of_training = all_keys(file)
    groups = {key.partition(".")[0] for key in of_training if "." in key}
    settings = []
    for setting in file.settings:
        is_of_training = setting.key in of_training or setting.key.startswith("strategy.")
        is_empty_group = setting.value is None and setting.key in groups
        if setting.key in OPTIONS or not (is_of_training or is_empty_group):
            settings.append(setting._replace(also=of_training))
    return settings
