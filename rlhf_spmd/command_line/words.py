"""From the arguments of a command line to a configuration, a cluster and a calibration."""

import argparse
from collections.abc import Sequence

from rlhf_spmd.command_line.arguments import CHECKED
from rlhf_spmd.command_line.checks import num_rows
from rlhf_spmd.config import presets
from rlhf_spmd.config.epochs import length_of
from rlhf_spmd.config.file import ConfigFile, read_config_file, to_text
from rlhf_spmd.config.options import Config, resolved
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import calibration_for, load_calibration, with_reserve
from rlhf_spmd.machines.cluster_file import read_cluster
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration

DEFAULT_STRATEGY = "flattening"
TRAINING = ("train", "evaluate")  # verbs that run the code that the file of a run names
NO_STRATEGY = ("plan", "profile")  # verbs that run none


def read_words(parsed: argparse.Namespace) -> None:
    """Reads the file of --config, and completes the options that it names. Options of its strategy are left out where
    the command line names another strategy, and where the planner chooses. Raises UserError."""
    file = read_config_file(parsed.config)
    named = getattr(parsed, "strategies", None) or list(filter(None, [getattr(parsed, "strategy", None)]))
    if parsed.verb != "generate" and (parsed.verb not in TRAINING or getattr(parsed, "dry_run", False)):
        refuse_code(parsed, file, named)
    strategy = file.words.get("strategy", DEFAULT_STRATEGY)
    if parsed.verb in CHECKED and not named:
        if strategy == "auto":
            raise UserError(
                f"{file.path}: strategy auto is planned when a run starts: name a strategy after `{parsed.verb}`, or "
                "let `plan` write one"
            )
        parsed.strategies, parsed.strategy = [strategy], strategy
    if parsed.verb == "plan" or (named and strategy not in named):
        file = file.without(lambda key: key.startswith("strategy."))
    has_cluster = any(getattr(parsed, name, None) for name in ("layout", "cluster"))
    for name in ("strategy", "layout", "cluster", "calibration", "runs", "name"):
        if getattr(parsed, name, "") is None and not (has_cluster and name in ("layout", "cluster")):
            setattr(parsed, name, file.words.get(name))
    parsed.file = file


def refuse_code(parsed: argparse.Namespace, file: ConfigFile, strategies: Sequence[str]) -> None:
    """Raises UserError if a run wrote the file, and code that it names would be run by a subcommand that does not
    train: such code must be named on the command line."""
    named = {"algorithm": parsed.algorithm, "strategy": strategies or parsed.verb in NO_STRATEGY}
    for word, is_named in named.items():
        if word in file.code and not is_named:
            option = f"{parsed.verb} " if word == "strategy" and parsed.verb in CHECKED else f"--{word} "
            raise UserError(
                f"{file.path}: the {word} {file.code[word]} comes from a run's folder, and {parsed.verb} runs no such "
                f"code; if you trust it, name it yourself: {option}{file.code[word]}"
            )


def code_note(file: ConfigFile | None) -> str:
    """Returns what a run is to say about the code that the file of another run names; empty if there is none."""
    if file is None or not file.code:
        return ""
    named = ", ".join(f"{name} {text}" for name, text in file.code.items())
    return f"note: this runs code that {file.path} names: {named}"


def load_config(parsed: argparse.Namespace, *, on_gpu: bool = False) -> Config:
    """Returns the configuration that a command line names. Raises UserError."""
    return presets.load(
        parsed.preset, parsed.overrides, parsed.model, algorithm=parsed.algorithm, on_gpu=on_gpu, file=parsed.file
    )


def read(
    parsed: argparse.Namespace, layout: str = "1x4", *, required: bool = True
) -> tuple[Config, Cluster, Calibration | None]:
    """Returns the configuration, the cluster and its calibration that a command line names. Raises UserError.

    layout: used where it names none.
    required: whether a missing calibration is an error.
    """
    config, given = load_config(parsed), getattr(parsed, "calibration", None)
    if parsed.cluster and (parsed.layout or parsed.device_type):
        raise UserError("--cluster says how many devices of which type there are; drop --layout and --device-type")
    if parsed.cluster:
        cluster = read_cluster(parsed.cluster)
    else:
        devices = list(load_calibration(given).devices) if given else []
        device = devices[0] if len(devices) == 1 else config.device_type
        cluster = Cluster.parse(parsed.layout or layout, parsed.device_type or device)
    if set(cluster.device_types) != {"cpu"}:
        config = load_config(parsed, on_gpu=True)
    calibration = calibration_for(given, cluster, required=required)
    return config, with_reserve(cluster, config.reserve, calibration), calibration


def length_note(config: Config) -> str:
    """Returns how many iterations data.epochs are, for people; empty without that option. Counts the rows. Raises
    UserError."""
    if not config.data.epochs:
        return ""
    if not (num := num_rows(config)):
        raise UserError(f"data.epochs={config.data.epochs:g} needs the rows of a file: give data.prompts=FILE")
    text = length_of(config, num, at_most=config.data.long_prompts == "drop" or bool(config.algorithm.responses))
    return text + ": their number is known when the rows are tokenised" * bool(config.mini_batch_tokens)


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
