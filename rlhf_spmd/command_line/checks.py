"""What several subcommands check of a run before it starts, and the report of `check`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlhf_spmd.command_line.fitting_strategies import Evaluate, advice, no_evaluation
from rlhf_spmd.config.options import NO_PROMPTS, Config, evaluated, prompt_files, split_functions
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import every_file
from rlhf_spmd.pages.algorithm import check_functions
from rlhf_spmd.pages.function_sources import Unread
from rlhf_spmd.plan.program.evaluation import evaluation_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.proof.memory_check import Finding
from rlhf_spmd.plan.text.program_listing import show_evaluation, show_findings, show_packed, show_program, verdict
from rlhf_spmd.plan.workflow import Workflow
from rlhf_spmd.runtime.guard.terminal import print_json, table_width

CONFIG_HEADING = "# The configuration, which can be given back as a file: --config FILE.yaml"


def packs(config: Config, program: Program) -> bool:
    """Returns whether a matmul library may pack weights for generation."""
    shapes = [shape for shape in program.workload.models.values() if shape]
    return config.products != "linear" and any(shape.has_large_matrices for shape in shapes)


def tokenizer_findings(config: Config) -> list[Finding]:
    """Returns a warning if an adapter has another tokenizer than its base."""
    note = config.tokenizer_warning
    return [Finding("warning", note)] if note else []


def evaluate_of(config: Config) -> Evaluate:
    """Returns what makes the program of a run's evaluations from that of its training. Counts the prompts, once. Raises
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
        max_response=evaluated(config).row_tokens,
        by_function=evaluated(config).only_function,
    )


def num_rows(config: Config) -> int:
    """Returns the rows in the files of data.prompts. Raises UserError."""
    from rlhf_spmd.runtime.data.readers import others_of, read_records

    key = config.data.key or config.algorithm.prompts
    others = others_of(key, tuple(config.algorithm.responses.values()))
    return sum(len(read_records(path, key, others)) for path in every_file(prompt_files(config)))


def check_both(training: Program, evaluation: Program | None) -> list[Finding]:
    """Returns the findings about the program of a run and that of its evaluations."""
    of_evaluation = check(evaluation, beside=training) if evaluation else []
    return check(training) + [replace(one, message=f"evaluation: {one.message}") for one in of_evaluation]


def check_inputs(config: Config, workflow: Workflow, *, runs: bool = False) -> list[Finding]:
    """Checks the functions and the data of a run as its start would, from their source and from the first rows. Of the
    user's code only the page of the algorithm is imported.

    runs: whether this is the command line of a run, which needs prompts.
    """
    findings = _finding_of(lambda: check_functions(config.algorithm, workflow, config.options, from_source=True))
    findings += [] if prompt_files(config) or not runs else [Finding("error", NO_PROMPTS)]
    findings += _check_data(config)
    if config.eval.prompts:
        where = f"evaluation on {config.eval.prompts}"
        new = [one for one in _check_data(evaluated(config)) if one not in findings]
        findings += [replace(one, message=f"{where}: {one.message}") for one in new]
    return findings


def _finding_of(check: Callable[[], object]) -> list[Finding]:
    """Returns the error that a check raises as a finding."""
    try:
        check()
    except UserError as error:
        return [Finding("error", str(error))]
    return []


def _check_data(config: Config) -> list[Finding]:
    """Checks the data set, and that it has the columns that reward functions ask for. Returns findings."""
    from rlhf_spmd.runtime.data.first_rows import check_first_rows

    findings = _finding_of(lambda: check_first_rows(config))
    if not any(role.judge for role in config.algorithm.roles.values()):
        return findings
    is_readable = bool(prompt_files(config)) and not findings
    for spec in split_functions(config.reward_function):
        try:
            findings += _finding_of(partial(_check_reward, spec, config, is_readable=is_readable))
        except Unread as why:
            findings.append(Finding("warning", f"reward function {spec} is unchecked: {why}"))
    return findings


def _check_reward(spec: str, config: Config, *, is_readable: bool) -> None:
    """Raises UserError for a reward function that a run would refuse, and Unread if that is not known here."""
    from rlhf_spmd.runtime.data.first_rows import NUM_ROWS
    from rlhf_spmd.runtime.rewards.function import read_reward_function

    function = read_reward_function(spec)
    if function.asks_for_columns and is_readable:
        named, key = prompt_files(config), config.data.key or config.algorithm.prompts
        names = partial(column_names, every_file(named), key, has_source=len(named) > 1)
        try:
            function.bound_to(names(most=NUM_ROWS))
        except UserError:  # unless a later row has the column
            function.bound_to(names())


def column_names(paths: Sequence[Path], key: str, *, has_source: bool, most: int | None = None) -> list[str]:
    """Returns the columns of files of prompts that reward functions may ask for. Raises UserError.

    key: of the prompts.
    has_source: a row without data_source is given one.
    most: number of rows that are read of each file (None: all).
    """
    from rlhf_spmd.runtime.data.readers import SOURCE, read_records

    names = dict.fromkeys([SOURCE] if has_source else [])
    for _, row in (entry for path in paths for entry in read_records(path, key, most=most)):
        names |= dict.fromkeys(name for name, value in row.items() if name != key or not isinstance(value, str))
    return list(names)


def print_report(
    program: Program,
    findings: Sequence[Finding],
    name: str,
    title: str,
    config: str | None,
    may_pack: bool,
    rank: int = 0,
    evaluate: Evaluate = no_evaluation,
    length: str = "",
    as_json: bool | None = None,
) -> int:
    """Prints a program, its configuration, the findings about it, the verdict and, last, a line of JSON. Returns the
    exit status.

    config: the configuration as text; None: it is not printed.
    may_pack: see `packs`.
    rank: the rank whose instructions are printed.
    evaluate: makes the program of the run's evaluations.
    length: length of the run, see words.length_note.
    as_json: --json or --no-json.
    """
    columns = table_width()
    print(show_program(program, title=f"{title}\n{length}" if length else title, rank=rank, columns=columns))
    if may_pack and (packed := show_packed(program)):
        print(packed)
    if evaluation := evaluate(program):
        print(show_evaluation(evaluation, columns))
    if config is not None:
        print(f"\n{CONFIG_HEADING}\n{config}")
    if findings:
        print(show_findings(findings))
    if advised := advice(program, evaluate):
        print(f"\n{advised}")
    print(f"\n{verdict(findings)}")
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
