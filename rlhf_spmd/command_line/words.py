"""From the arguments of a command line to a configuration, a cluster and a calibration."""

import argparse
from dataclasses import replace

from rlhf_spmd.command_line.arguments import CHECKED
from rlhf_spmd.command_line.checks import num_rows
from rlhf_spmd.config import presets
from rlhf_spmd.config.epochs import length_of
from rlhf_spmd.config.file import ConfigFile, read_config_file, to_text
from rlhf_spmd.config.options import Config, make_workload, resolved
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.machines.cluster_calibration import calibration_for, with_reserve
from rlhf_spmd.machines.cluster_file import read_cluster
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.workload import Workload

DEFAULT_STRATEGY = "flattening"
NO_STRATEGY = ("plan", "profile")  # verbs that run none


def read_words(parsed: argparse.Namespace) -> None:
    """Reads the file of --config, and completes the options that it names. Options of its strategy are left out where
    the command line names another strategy, and where the planner chooses. Raises UserError."""
    file = trusted(parsed, read_config_file(parsed.config))
    own = file.words.get("strategy", DEFAULT_STRATEGY)
    named = getattr(parsed, "strategies", None) or [one for one in [getattr(parsed, "strategy", None)] if one]
    if parsed.verb in CHECKED and not named:
        if own == "auto":
            raise UserError(
                f"{file.path}: strategy auto is planned when a run starts: name a strategy after `{parsed.verb}`, or "
                "let `plan` write one"
            )
        parsed.strategies = [own]
    if parsed.verb == "plan" or (named and own not in named):
        file = file.without(lambda key: key.startswith("strategy."))
    on_devices = any(getattr(parsed, name, None) for name in ("layout", "cluster"))
    for name in ("strategy", "layout", "cluster", "calibration", "runs", "name"):
        if not (on_devices and name in ("layout", "cluster")) and getattr(parsed, name, "") is None:
            one = parsed.verb in CHECKED and parsed.verb != "draw" and name == "strategy"
            setattr(parsed, name, own if one else file.words.get(name))
    parsed.file = file


def trusted(parsed: argparse.Namespace, file: ConfigFile) -> ConfigFile:
    """Returns a file of options. If a run wrote the file, a subcommand that does not train runs no code from it: such
    code must be named on the command line. Raises UserError."""
    trains = parsed.verb in ("train", "evaluate") and not getattr(parsed, "dry_run", False)
    code = {} if trains else file.code
    if parsed.verb == "generate":  # which needs neither
        words = {word: text for word, text in file.words.items() if word not in ("algorithm", "strategy")}
        return replace(file, words=words, page=None).without(code.__contains__) if code else file
    strategy = getattr(parsed, "strategies", None) or getattr(parsed, "strategy", None)
    given = {"algorithm": parsed.algorithm, "strategy": strategy or parsed.verb in NO_STRATEGY}
    for what, is_given in given.items():
        if what in code and not is_given:
            option = f"{parsed.verb} " if what == "strategy" and parsed.verb in CHECKED else f"--{what} "
            raise UserError(
                f"{file.path}: the {what} {code[what]} comes from a run's folder, and {parsed.verb} runs no such code; "
                f"if you trust it, name it yourself: {option}{code[what]}"
            )
    return file


def code_note(file: ConfigFile | None) -> str:
    """Returns what a run is to say about the code that the file of another run names; empty if there is none."""
    if file is None or not (code := file.code):
        return ""
    named = ", ".join(f"{name} {text}" for name, text in code.items())
    return f"note: this runs code that {file.path} names: {named}"


def load_config(parsed: argparse.Namespace, *, on_gpu: bool = False) -> Config:
    """Returns the configuration that a command line names. Raises UserError."""
    return presets.load(
        parsed.preset, parsed.overrides, parsed.model, algorithm=parsed.algorithm, on_gpu=on_gpu, file=parsed.file
    )


def read_config_and_cluster(
    parsed: argparse.Namespace, layout: str = "1x4", device_type: str | None = None
) -> tuple[Config, Cluster]:
    """Returns the configuration and the cluster that a command line names. Raises UserError.

    layout, device_type: used where it names none (None: the preset's).
    """
    config = load_config(parsed)
    if parsed.cluster and (parsed.layout or parsed.device_type):
        raise UserError("--cluster says how many devices of which type there are; drop --layout and --device-type")
    if parsed.cluster:
        cluster = read_cluster(parsed.cluster)
    else:
        cluster = Cluster.parse(parsed.layout or layout, parsed.device_type or device_type or config.device_type)
    if set(cluster.device_types) != {"cpu"}:
        config = load_config(parsed, on_gpu=True)
    return config, cluster


def length_note(config: Config) -> str:
    """Returns how many iterations data.epochs are, for people; empty without that option. Counts the rows. Raises
    UserError."""
    if not config.data.epochs:
        return ""
    if not (num := num_rows(config)):
        where = f"{config.data.prompts} has none" if config.data.prompts else "give data.prompts=FILE"
        raise UserError(f"data.epochs={config.data.epochs:g} needs the rows of a file; {where}")
    if config.mini_batch_tokens:
        return f"{length_of(config, num)}: the number of iterations is known when the rows are tokenised"
    loses_rows = config.data.long_prompts == "drop" or bool(config.algorithm.responses)
    return length_of(config, num, at_most=loses_rows)


def config_text(parsed: argparse.Namespace, config: Config, strategy: str, length: str) -> str:
    """Returns the configuration as a file for --config.

    length: see length_note().
    """
    file = parsed.file or ConfigFile("")
    algorithm = None if file.page else parsed.algorithm or file.words.get("algorithm")
    values = resolved(config, algorithm=algorithm, strategy=strategy)
    if not length:
        return to_text(values)
    del values["iterations"]  # they follow from data.epochs
    return f"# {length}\n{to_text(values)}"


def config_words(parsed: argparse.Namespace, preset: str | None) -> list[str]:
    """Returns the arguments of a command line that name the file, the algorithm, this preset (with a file: what it
    names) and the model."""
    preset = parsed.preset if parsed.config else preset
    named = {"--config": parsed.config, "--algorithm": parsed.algorithm, "--preset": preset, "--model": parsed.model}
    return [word for name, value in named.items() if value for word in (name, value)]


def read(parsed: argparse.Namespace, layout: str = "1x4") -> tuple[Config, Workload, Cluster, Calibration]:
    """Reads what to plan for. Raises UserError if something does not exist or fit together.

    layout: the default.
    """
    config, cluster, calibration = read_calibrated(parsed, layout)
    assert calibration is not None, "required"
    refuse_options(config)
    return config, make_workload(config), cluster, calibration


def read_calibrated(
    parsed: argparse.Namespace, layout: str = "1x4", *, required: bool = True
) -> tuple[Config, Cluster, Calibration | None]:
    """Reads the configuration, the cluster and its calibration. Raises UserError as read().

    required: None is an error.
    """
    devices = list(load_calibration(parsed.calibration).devices) if parsed.calibration else []
    config, cluster = read_config_and_cluster(parsed, layout, devices[0] if len(devices) == 1 else None)
    calibration = calibration_for(parsed.calibration, cluster, required=required)
    return config, with_reserve(cluster, config.reserve, calibration), calibration


def refuse_options(config: Config) -> None:
    """Raises UserError if there are options of a strategy, because the planner makes its own."""
    if config.strategy:
        first = next(iter(config.strategy))
        raise UserError(f"strategy.{first} is an option of a strategy, but the planner chooses every layout; drop it")
