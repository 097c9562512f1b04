"""Reads the run that `train --resume` continues: its checkpoint and its options, and refuses changes of the results.

The options are those in the run folder, which a resumed run writes again with its overrides. They are compared with the
options of the checkpoint; a change that would change the results is refused by name. No torch, which starts later.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_spmd.config import options as configs
from rlhf_spmd.config.checks import check_options, foreign_functions
from rlhf_spmd.config.file import ConfigFile
from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.reading import is_file, why_no_file
from rlhf_spmd.model.config import read_json
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.pages.option_tree import options_of, with_value
from rlhf_spmd.pages.option_values import parse_value
from rlhf_spmd.runtime.checkpoint.checkpoint_files import STATE, Checkpoint, newest, reading, without_manifest

# Options that change no results of a run, except for rounding: where it computes, and in which portions.
MAY_CHANGE = (
    "iterations",
    "data.epochs",
    "deadline_s",
    "device",
    "parity_tolerance",
    "wandb",
    "mlflow",
    "trackio",
    "reward_workers",
    "environment_workers",
    "episode.on_failure",  # a group that is dropped makes a run inexact anyway
    "reward_timeout_s",  # a response that runs out makes a run inexact anyway
    "forecast_lengths",
    "forecast_episodes",
    "forecast_failed_groups",
    "micro_batch",
    "generation.max_sequences",
    "generation.block_size",
    "generation.cache_fraction",
    "checkpoint.",
    "eval.every",
    "eval.at_start",
    "eval.patience",
    "rollouts.",
    "logging.",
    "strategy.",
)
CLUSTER, STRATEGY, PROGRAM, CONFIG = "cluster.toml", "strategy.py", "program.json", "config.json"
PRODUCTS = "products"  # in PROGRAM: the library of matrix products of the run
STARTED = "started"  # in PROGRAM: the time of the first start of the run, which chat templates write
PROMPTS_USED = "prompts_used"  # in the state: where rows are sampled in rounds
ALGORITHM = "algorithm.py"  # the page, unless it is one of the package's


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run to continue.

    state: of the checkpoint; empty without one: the run then starts again in its folder.
    """

    folder: Path
    config: Config
    strategy: str  # its name when it was started; the module is in the folder
    checkpoint: Checkpoint | None
    state: Mapping[str, Any]
    notes: tuple[str, ...]
    started: str = ""  # the time of the first start
    products: tuple[Any, str] | None = None  # the library of products as a file has it, and the file

    @property
    def iteration(self) -> int:
        """The number of finished iterations."""
        return self.checkpoint.iteration if self.checkpoint else 0

    @property
    def cluster(self) -> str | None:
        """The cluster file of the run, if it was started with one."""
        path = self.folder / CLUSTER
        return str(path) if is_file(path) else None


def read_run(folder: str, overrides: Iterable[str], *, other_strategy: bool, file: ConfigFile | None = None) -> Resumed:
    """Reads the run that `train --resume FOLDER` continues. Raises UserError.

    other_strategy: --strategy is given, so options of the previous strategy are dropped.
    file: of --config, whose options have a lower precedence than the overrides.
    """
    path = Path(folder)
    for own in (path / CONFIG, path / STRATEGY):
        if why := why_no_file(own):
            raise UserError(
                f"{folder} is not a run folder: {own} {why}; give the folder of a run, or restore that file"
            )
    checkpoint = newest(path / "checkpoints")
    page = str(path / ALGORITHM) if is_file(path / ALGORITHM) else None
    stored = made_with = config_of(read_json(path / CONFIG), str(path / CONFIG), page)
    if checkpoint is not None:
        with reading(checkpoint.folder, CONFIG):
            made_with = config_of(json_value(checkpoint.text(CONFIG)), str(checkpoint.folder / CONFIG), page)
    if other_strategy:
        stored = dataclasses.replace(stored, strategy={})
    config = configs.overridden(stored, overrides, file.given if file else ())
    refuse_changes(made_with, config, folder)
    check_options(config)
    incomplete = without_manifest(path / "checkpoints")
    notes = [f"{draft} has no manifest, so it is not used, but deleted" for draft in incomplete]
    notes += [] if checkpoint else [f"{folder} has no checkpoint yet: it starts again at iteration 1"]
    state = read_state(checkpoint, config) if checkpoint else {}
    refuse_fewer(config, checkpoint.iteration if checkpoint else 0, folder)
    about = read_json(path / PROGRAM) if is_file(path / PROGRAM) else {}
    functions = foreign_functions(config.reward_function, config.eval.reward_function, config.environment)
    code = [*([] if other_strategy else [STRATEGY]), *([ALGORITHM] if page else []), *functions]
    if code:
        notes.append(f"this runs code that {folder} holds or names: {', '.join(code)}")
    name = str(about.get("strategy", path.name))
    products = (about[PRODUCTS], str(path / PROGRAM)) if PRODUCTS in about else None
    return Resumed(path, config, name, checkpoint, state, tuple(notes), str(about.get(STARTED, "")), products)


def refuse_other_start(resumed: Resumed, given: Config, *, names_model: bool) -> None:
    """Raises UserError if a command line starts another run than the one that it is to continue (`--resume auto`).
    given: its config. names_model: it names the folder of the main model."""
    run, config = resumed.folder, resumed.config
    there = {"preset": config.preset, "algorithm": config.algorithm.name, "model": config.models[config.main_role]}
    here = {"preset": given.preset, "algorithm": given.algorithm.name, "model": given.models[given.main_role]}
    for name in there:
        if here[name] != there[name] and (names_model or name != "model"):
            raise UserError(f"{run} was started with {name} {there[name]}, not {here[name]}: give --name a new name")
    if given.algorithm.source != config.algorithm.source:
        raise UserError(f"the file of algorithm {here['algorithm']} has changed since {run} was started: restore it")


def refuse_fewer(config: Config, done: int, folder: str | Path) -> None:
    """Raises UserError if a run has done more iterations than it is to have."""
    if config.iterations < done:
        given, fix = f"iterations={config.iterations}", f"iterations={done} or more"
        if config.data.epochs:
            given, fix = f"data.epochs={config.data.epochs:g} is {config.iterations} iterations", "a larger data.epochs"
        raise UserError(f"{given}, but {folder} has done {done}; give {fix}")


def refuse_other_inputs(now: Mapping[str, str], resumed: Resumed) -> None:
    """Raises UserError for the first input that is not as in the checkpoint. now: fingerprints by name."""
    before = resumed.state["inputs"]
    for name, fingerprint in now.items():
        if before.get(name) == fingerprint:
            continue
        logprobs = resumed.config.data.precomputed_logprobs or (resumed.config.data.precompute and resumed.folder)
        files = f"the logprobs in {logprobs}" if logprobs else resumed.config.data.chat_template
        also = f" (or {files} did)" if files and name.startswith("prompts in ") else ""
        raise UserError(
            f"the {name} changed since {resumed.folder} was started{also}; restore the file, or start a new run"
        )


def refuse_older(resumed: Resumed) -> None:
    """Raises UserError if another process has continued the run since it was read. Call it with the folder locked."""
    now = newest(resumed.folder / "checkpoints")
    if now != resumed.checkpoint:
        name = now.folder.name if now else "none"
        raise UserError(
            f"another process has just resumed {resumed.folder}: its newest checkpoint is now {name}, and this process "
            f"was about to continue after {resumed.iteration} iterations; resume it again"
        )


def read_state(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    """Reads state.json of a checkpoint. Raises UserError."""
    with reading(checkpoint.folder, STATE):
        values = json_value(checkpoint.text(STATE))
        config.algorithm.read_state(values["state"])
        used = {PROMPTS_USED: int(values[PROMPTS_USED])} if PROMPTS_USED in values else {}
        return used | {name: values[name] for name in ("state", "inputs", "surroundings", "ahead")}


def config_of(values: Mapping[str, Any], source: str, page: str | None = None) -> Config:
    """Restores a config from the result of `config.resolved`; missing options have their defaults. Raises UserError
    naming `source`.

    page: the algorithm's file; None: one of the package's.
    """
    if not isinstance(values, Mapping) or "preset" not in values:
        raise UserError(f"{source} is not an object with a preset; restore the file")
    name, strategy = str(values.get("algorithm", "ppo")), values.get("strategy", {})
    if page is None and name.endswith(".py"):
        raise UserError(
            f"{source} names the algorithm {name}, and a run keeps its file as {ALGORITHM}; restore that file"
        )
    if not isinstance(strategy, Mapping):
        raise UserError(f"{source}: strategy is not an object; restore the file")
    options = {option: text for option, text in strategy.items() if option != "name"}  # the name is for --config
    algorithm = load_algorithm(page or name, name)
    config = Config(preset=str(values["preset"]), algorithm=algorithm, strategy=options)
    known = options_of(config)
    for key, value in _flat(values).items():
        if key not in known:
            raise UserError(f"{source} has the option {key}, which this version does not know")
        config = with_value(config, key, parse_value(known[key].annotation, value, f"{source}: {key}"))
    return config


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns grouped options by their dotted keys, without the algorithm and the strategy's options."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name in ("algorithm", "strategy"):
            continue
        if isinstance(value, Mapping):
            flat |= {f"{name}.{leaf}": inner for leaf, inner in value.items()}
        else:
            flat[name] = value
    return flat


def refuse_changes(before: Config, after: Config, folder: str) -> None:
    """Raises UserError for the first changed option that would change the results."""
    old, new = configs.leaves(before), configs.leaves(after)
    for key in sorted({*old, *new}):
        if old.get(key) == new.get(key):
            continue
        counts = key == "iterations" or (key == "data.epochs" and after.data.epochs)
        if counts and before.optimizer.length_matters:
            schedule = before.optimizer.schedule
            ends = f"schedule {schedule} ends after {old['iterations']} iterations"
            if schedule == "constant":
                ends = f"warm-up is {before.optimizer.warmup_ratio:g} of {old['iterations']} iterations"
            raise UserError(
                f"{key}={new[key]} would change every learning rate of {folder}, whose {ends}; leave {key} as it is"
            )
        if not key.startswith(MAY_CHANGE):
            others = ", ".join(name + "*" if name.endswith(".") else name for name in MAY_CHANGE)
            raise UserError(
                f"{key}={new.get(key)} would change the results of {folder}, which has {old.get(key) or 'none'}; drop "
                f"it, or start a new run (a resumed run may change {others})"
            )
