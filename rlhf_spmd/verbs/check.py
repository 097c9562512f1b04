"""The check verb: a placement, its program and the proof that it cannot hang, without MPI and torch."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlhf_spmd.config import presets
from rlhf_spmd.config.epochs import length_of
from rlhf_spmd.config.file import FUNCTIONS, ConfigFile, read_config_file, to_text
from rlhf_spmd.config.options import Config, evaluated, make_workload, prompt_files, resolved, split_functions
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.cluster_calibration import calibration_for, with_reserve
from rlhf_spmd.machines.cluster_file import read_cluster
from rlhf_spmd.model.tokenizer_check import reading_note
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.evaluation import evaluation_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.proof.memory_check import Finding
from rlhf_spmd.plan.runtime_words import PROMPTS
from rlhf_spmd.plan.text.program_listing import show_evaluation, show_findings, show_packed, show_program
from rlhf_spmd.verbs.fitting_strategies import Evaluate, advice, no_evaluation

DEFAULT_STRATEGY = "flattening"
CONFIG_HEADING = "# The configuration, which can be given back as a file: --config FILE.yaml"


def run(parsed: argparse.Namespace) -> int:
    """Prints the report -> the exit status. Raises UserError."""
    config, cluster = read_config_and_cluster(parsed)
    if set(cluster.device_types) != {"cpu"}:  # whose memory has no limit
        cluster = with_reserve(cluster, config.reserve, calibration_for(None, cluster))
    strategy = load_strategy(parsed.strategy)
    if not 0 <= parsed.rank < cluster.num_devices:
        raise UserError(f"--rank {parsed.rank} is not in the layout {cluster} (0-{cluster.num_devices - 1})")
    program = strategy.compile(make_workload(config), cluster, config.strategy)
    title = f"{strategy.name} on {cluster}, preset {config.title}"
    evaluate = evaluate_of(config)
    findings = check_both(program, evaluate(program)) + check_rewards(config, parsed.file) + tokenizer_findings(config)
    text = config_text(parsed, config, parsed.strategy)
    return print_report(program, findings, strategy.name, title, text, packs(config, program), parsed.rank, evaluate)


def packs(config: Config, program: Program) -> bool:
    """Whether a library of products may pack weights for generation."""
    shapes = [shape for shape in program.workload.models.values() if shape]
    return config.products != "linear" and any(shape.has_large_matrices for shape in shapes)


def tokenizer_findings(config: Config) -> list[Finding]:
    """Warnings about what transformers makes of the tokenizers. Raises UserError if that is something else."""
    return [Finding("warning", note) for note in filter(None, map(reading_note, config.tokenizer_folders))]


def evaluate_of(config: Config) -> Evaluate:
    """What makes the program of a run's evaluations from that of its training. Counts the prompts, once. Raises
    UserError."""
    evaluation = config.eval
    if not evaluation.prompts:
        return no_evaluation
    num = num_rows(evaluated(config))
    if not num:
        raise UserError(f"eval.prompts={evaluation.prompts} holds no prompt; add some, or drop eval.prompts")
    return partial(
        evaluation_program,
        num_prompts=min(num, evaluation.num_prompts) if evaluation.num_prompts else num,
        samples_per_prompt=evaluation.samples_per_prompt,
        temperature=evaluation.temperature,
        max_response=evaluated(config).generation.max_new_tokens,
        by_function=evaluated(config).only_function,
    )


def num_rows(config: Config) -> int:
    """The rows in the files of data.prompts. Raises UserError."""
    from rlhf_spmd.runtime.data.readers import others_of, read_records

    key = config.data.key or config.algorithm.data[PROMPTS]
    others = others_of(key, tuple(config.algorithm.responses.values()))
    return sum(len(read_records(Path(path), key, others)) for path in prompt_files(config))


def check_both(training: Program, evaluation: Program | None) -> list[Finding]:
    """The findings about the program of a run and that of its evaluations."""
    of_evaluation = check(evaluation, beside=training) if evaluation else []
    return check(training) + [replace(one, message=f"evaluation: {one.message}") for one in of_evaluation]


def check_rewards(config: Config, file: ConfigFile | None = None) -> list[Finding]:
    """Warnings about reward functions that are not on this machine, or that only a run's file names. Loads the others,
    and raises UserError for one that a run would refuse."""
    if not any(role.judge for role in config.algorithm.roles.values()):
        return []
    if file and (code := {key: text for key, text in file.code.items() if key in FUNCTIONS}):
        named = " ".join(f"{key}={text}" for key, text in code.items())
        return [Finding("warning", f"{file.path} names {named}: not loaded and not checked; add it if you trust it")]
    findings = [_check_reward(spec, config) for spec in split_functions(config.reward_function)]
    if config.eval.prompts:
        evaluation = evaluated(config)
        try:
            findings += [_check_reward(spec, evaluation) for spec in split_functions(evaluation.reward_function)]
        except UserError as error:
            raise UserError(f"evaluation on {config.eval.prompts}: {error}") from None
    return list(dict.fromkeys(filter(None, findings)))


def _check_reward(spec: str, config: Config) -> Finding | None:
    """check_rewards() for one function. Rows are read only if it asks for a column, and if all files are here."""
    from rlhf_spmd.runtime.rewards.function import load_reward_function, source_file

    module, _, name = spec.rpartition(":")
    if module and name.isidentifier() and source_file(spec) is None:  # else loading says what is wrong with it
        return Finding("warning", f"reward function {spec} is not here, so its parameters are not checked")
    paths = [Path(path) for path in prompt_files(config)]
    function = load_reward_function(spec, None)
    if function.asks_for_columns and paths and all(path.is_file() for path in paths):
        function.bound_to(column_names(paths, config.data.key or config.algorithm.data[PROMPTS]))
    return None


def column_names(paths: Sequence[Path], key: str) -> list[str]:
    """The columns of files of prompts that reward functions may ask for. key: of the prompts. Raises UserError."""
    from rlhf_spmd.runtime.data.prompts import SOURCE
    from rlhf_spmd.runtime.data.readers import read_records

    names = dict.fromkeys([SOURCE] if len(paths) > 1 else [])
    for _, row in (entry for path in paths for entry in read_records(path, key)):
        names |= dict.fromkeys(name for name, value in row.items() if name != key or not isinstance(value, str))
    return list(names)


def read_config_and_cluster(
    parsed: argparse.Namespace, layout: str = "1x4", device_type: str | None = None
) -> tuple[Config, Cluster]:
    """What a command line names; layout, device_type: used where it names none (None: the preset's). Raises
    UserError."""
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


def load_config(parsed: argparse.Namespace, *, on_gpu: bool = False) -> Config:
    """The configuration that a command line names. Raises UserError."""
    return presets.load(
        parsed.preset, parsed.overrides, parsed.model, algorithm=parsed.algorithm, on_gpu=on_gpu, file=parsed.file
    )


def read_words(parsed: argparse.Namespace) -> None:
    """Reads the file of --config, and completes the options that it names. Options of its strategy are left out where
    the command line names another strategy, and where the planner chooses. Raises UserError."""
    file = trusted(parsed, read_config_file(parsed.config))
    own = file.words.get("strategy", DEFAULT_STRATEGY)
    named = getattr(parsed, "strategies", None) or [one for one in [getattr(parsed, "strategy", None)] if one]
    if parsed.verb in ("check", "draw", "forecast") and not named:
        if own == "auto":
            raise UserError(
                f"{file.path}: strategy auto is planned when a run starts: name a strategy behind `{parsed.verb}`, or "
                "let `plan` write one"
            )
        parsed.strategies = [own]
    if parsed.verb == "plan" or (named and own not in named):
        file = file.without(lambda key: key.startswith("strategy."))
    on_devices = any(getattr(parsed, name, None) for name in ("layout", "cluster"))
    for name in ("strategy", "layout", "cluster", "calibration", "runs", "name"):
        if not (on_devices and name in ("layout", "cluster")) and getattr(parsed, name, "") is None:
            one = parsed.verb in ("check", "forecast") and name == "strategy"
            setattr(parsed, name, own if one else file.words.get(name))
    parsed.file = file


def trusted(parsed: argparse.Namespace, file: ConfigFile) -> ConfigFile:
    """A file of options, of which a verb that does not train runs no code if a run wrote the file: such code must be
    named on the command line. Raises UserError."""
    trains = parsed.verb in ("train", "precompute") and not getattr(parsed, "dry_run", False)
    code = file.code
    if trains or not file.of_run:
        return file
    keys = [word.partition("=")[0] for word in parsed.overrides]
    file = replace(
        file, settings=tuple(one for one in file.settings if one.key not in keys or one.key not in FUNCTIONS)
    )
    words, named = dict(file.words), getattr(parsed, "algorithm", None)
    how = "is named by a run's file, whose code is run by `train` alone; if you trust it, name it yourself:"
    if parsed.verb == "generate":
        file = file.without(lambda key: key in code)
        words = {word: text for word, text in words.items() if word not in ("algorithm", "strategy")}
        return replace(file, words=words, page=None)
    if "algorithm" in code and named is None:
        raise UserError(f"{file.path}: the algorithm {code['algorithm']} {how} --algorithm {code['algorithm']}")
    if "algorithm" in code and Path(named).absolute() != Path(code["algorithm"]).absolute():
        own = Path(words.pop("algorithm", "")).stem  # not loaded to ask for its roles
        file = file.without(lambda key: key.startswith((f"{own}.", "models.", "optimizer.")))
        return replace(file, words=words, page=None)
    if "algorithm" in code:
        file = replace(file, page=named)
    given = getattr(parsed, "strategies", None) or getattr(parsed, "strategy", None)
    if "strategy" in code and parsed.verb not in ("plan", "profile") and not given:
        word = "" if parsed.verb in ("check", "draw", "forecast") else "--strategy "
        raise UserError(f"{file.path}: the strategy {code['strategy']} {how} {parsed.verb} {word}{code['strategy']}")
    return file


def code_note(file: ConfigFile | None) -> str:
    """What a run is to say about the code that the file of another run names; empty if there is none."""
    code = file.code if file else {}
    named = ", ".join(f"{name} {text}" for name, text in code.items())
    return f"note: code that {file.path} names is run: {named}" if code else ""


def config_text(parsed: argparse.Namespace, config: Config, strategy: str) -> str:
    """The configuration as a file for --config."""
    file = parsed.file or ConfigFile("")
    algorithm = None if file.page else parsed.algorithm or file.words.get("algorithm")
    values = resolved(config, algorithm=algorithm, strategy=strategy)
    if not config.data.epochs:
        return to_text(values)
    if not (num := num_rows(config)):
        where = f"{config.data.prompts} has none" if config.data.prompts else "give data.prompts=FILE"
        raise UserError(f"data.epochs={config.data.epochs:g} needs the rows of a file; {where}")
    del values["iterations"]  # they follow from data.epochs
    if config.mini_batch_tokens:
        text = f"{length_of(config, num)}: the number of iterations is known when the rows are tokenised"
        return f"# {text}\n{to_text(values)}"
    loses_rows = config.data.long_prompts == "drop" or bool(config.algorithm.responses)
    return f"# {length_of(config, num, at_most=loses_rows)}\n{to_text(values)}"


def config_words(parsed: argparse.Namespace, preset: str | None) -> list[str]:
    """The words of a command line that name the file, the algorithm, this preset (with a file: what it names) and the
    model."""
    preset = parsed.preset if parsed.config else preset
    named = {"--config": parsed.config, "--algorithm": parsed.algorithm, "--preset": preset, "--model": parsed.model}
    return [word for name, value in named.items() if value for word in (name, value)]


def print_report(
    program: Program,
    findings: Sequence[Finding],
    name: str,
    title: str,
    config: str,
    may_pack: bool,
    rank: int = 0,
    evaluate: Evaluate = no_evaluation,
) -> int:
    """Prints a program, the findings about it, its configuration and, last, a line of JSON -> the exit status.
    may_pack: see `packs`. rank: whose instructions are printed. evaluate: makes the program of the run's
    evaluations."""
    print(show_program(program, title=title, rank=rank))
    if may_pack and (packed := show_packed(program)):
        print(packed)
    if evaluation := evaluate(program):
        print(show_evaluation(evaluation))
    print(show_findings(findings))
    if advised := advice(program, evaluate):
        print(f"\n{advised}")
    print(f"\n{CONFIG_HEADING}\n{config}\n")
    errors = sum(finding.severity == "error" for finding in findings)
    result = {
        "strategy": name,
        "layout": str(program.cluster),
        "fingerprint": program.fingerprint,
        "bytes_per_iteration": sum(transfer.num_bytes for transfer in program.transfers),
        "messages_per_iteration": sum(transfer.num_messages for transfer in program.transfers),
        "errors": errors,
        "warnings": len(findings) - errors,
        "ok": not errors,
    }
    print(json.dumps(result))
    return 1 if errors else 0
