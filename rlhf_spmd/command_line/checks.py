"""What several verbs check of a run before it starts, and the report of `check`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlhf_spmd.command_line.fitting_strategies import Evaluate, advice, no_evaluation
from rlhf_spmd.config.file import FUNCTIONS, ConfigFile
from rlhf_spmd.config.options import Config, evaluated, prompt_files, split_functions
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.texts.tokenizer_check import reading_note
from rlhf_spmd.plan.program.evaluation import evaluation_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.proof.memory_check import Finding
from rlhf_spmd.plan.text.program_listing import show_evaluation, show_findings, show_packed, show_program
from rlhf_spmd.runtime.guard.terminal import print_json

CONFIG_HEADING = "# The configuration, which can be given back as a file: --config FILE.yaml"


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

    key = config.data.key or config.algorithm.prompts
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
    return list(dict.fromkeys(one for one in findings if one is not None))


def _check_reward(spec: str, config: Config) -> Finding | None:
    """check_rewards() for one function. Rows are read only if it asks for a column, and if all files are here."""
    from rlhf_spmd.runtime.rewards.function import load_reward_function, source_file

    module, _, name = spec.rpartition(":")
    if module and name.isidentifier() and source_file(spec) is None:  # else loading says what is wrong with it
        return Finding("warning", f"reward function {spec} is not here, so its parameters are not checked")
    paths = [Path(path) for path in prompt_files(config)]
    function = load_reward_function(spec, None)
    if function.asks_for_columns and paths and all(path.is_file() for path in paths):
        function.bound_to(column_names(paths, config.data.key or config.algorithm.prompts))
    return None


def column_names(paths: Sequence[Path], key: str) -> list[str]:
    """The columns of files of prompts that reward functions may ask for. key: of the prompts. Raises UserError."""
    from rlhf_spmd.runtime.data.prompts import SOURCE
    from rlhf_spmd.runtime.data.readers import read_records

    names = dict.fromkeys([SOURCE] if len(paths) > 1 else [])
    for _, row in (entry for path in paths for entry in read_records(path, key)):
        names |= dict.fromkeys(name for name, value in row.items() if name != key or not isinstance(value, str))
    return list(names)


def print_report(
    program: Program,
    findings: Sequence[Finding],
    name: str,
    title: str,
    config: str,
    may_pack: bool,
    rank: int = 0,
    evaluate: Evaluate = no_evaluation,
    as_json: bool | None = None,
) -> int:
    """Prints a program, the findings about it, its configuration and, last, a line of JSON -> the exit status.
    may_pack: see `packs`. rank: whose instructions are printed. evaluate: makes the program of the run's
    evaluations. as_json: --json or --no-json."""
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
    print_json(result, as_json)
    return 1 if errors else 0


def refuse_errors(name: str, program: Program, findings: Sequence[Finding], evaluate: Evaluate = no_evaluation) -> None:
    """Raises UserError for a program that cannot run; if it does not fit, the error names strategies that do."""
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if errors:
        advised = advice(program, evaluate)
        raise UserError(
            f"strategy {name} is refused by check: {'; '.join(errors[:3])}" + (f". {advised}" if advised else "")
        )
