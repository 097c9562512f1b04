"""What several subcommands check of a run before it starts, and the report of `check`."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlhf_spmd.command_line.fitting_strategies import ADAPTERS, Evaluate, advice, no_evaluation
from rlhf_spmd.config.checks import foreign_functions
from rlhf_spmd.config.options import (
    NO_PROMPTS,
    Config,
    evaluated,
    make_workload,
    overridden,
    prompt_files,
    split_functions,
)
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import every_file
from rlhf_spmd.pages.algorithm import check_functions
from rlhf_spmd.pages.strategy import Strategy
from rlhf_spmd.plan.calls import Workflow
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.memory import most_bytes
from rlhf_spmd.plan.program.evaluation import evaluation_program, precompute_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.proof.memory_check import Finding
from rlhf_spmd.plan.text.program_listing import format_bytes
from rlhf_spmd.plan.workload import Workload

IMPORT_S = 10  # for importing the functions that the command line of `check` names


def tokenizer_findings(config: Config) -> list[Finding]:
    """Returns a warning if an adapter has another tokenizer than its base."""
    note = config.files().warning
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


@dataclass(frozen=True, slots=True)
class Compiled:
    """The programs of a run, and what `check` says about them.

    evaluation: of its evaluations; None: there are none.
    phases: options and programs of its start with data.precompute, one for each data set.
    advice: strategies that fit, where these programs are too large for their devices; else empty.
    """

    program: Program
    evaluation: Program | None
    phases: list[tuple[Config, Program]]
    findings: list[Finding]
    advice: str

    @property
    def programs(self) -> list[Program]:
        """All programs."""
        return [self.program, *filter(None, [self.evaluation]), *(program for _, program in self.phases)]

    @property
    def phases_note(self) -> str:
        """What the start of the run needs, for people; empty if there is none."""
        if not self.phases:
            return ""
        num_bytes = max(most_bytes(program) for _, program in self.phases)
        models = ", ".join(self.phases[0][1].workload.workflow.models)
        return f"first, logprobs by {models}: at most {format_bytes(num_bytes)} on a rank, freed before training"


def compiled(config: Config, strategy: Strategy, cluster: Cluster) -> Compiled:
    """Compiles and checks the programs of a run. Raises UserError."""
    evaluate = evaluate_of(config)
    program = strategy.compile(make_workload(config), cluster, config.strategy)
    evaluation, phases = evaluate(program), list[tuple[Config, Program]]()
    if config.data.precompute:
        whole = replace(config, data=replace(config.data, precompute=False))
        for options in (whole, evaluated(whole)) if config.eval.prompts else (whole,):
            training = strategy.compile(make_workload(options), cluster, options.strategy)
            phases.append((options, precompute_program(training, num_rows=options.rollout_batch)))
    findings = check_both(program, evaluation)
    for _, phase in phases:
        findings += _titled("data.precompute", check(phase))
    return Compiled(program, evaluation, phases, findings, advice(program, evaluate, partial(_with_adapters, config)))


def _with_adapters(config: Config) -> Workload | None:
    """Returns the workload of a run with adapters; None if it has some, or cannot."""
    if any(map(config.adapters, config.algorithm.roles)):
        return None
    with suppress(UserError):
        return make_workload(overridden(config, [ADAPTERS]))
    return None


def check_both(training: Program, evaluation: Program | None) -> list[Finding]:
    """Returns the findings about the program of a run and that of its evaluations."""
    return check(training) + (_titled("evaluation", check(evaluation, beside=training)) if evaluation else [])


def _titled(title: str, findings: Sequence[Finding]) -> list[Finding]:
    """Puts a title before the messages of findings."""
    return [replace(finding, message=f"{title}: {finding.message}") for finding in findings]


def check_inputs(
    config: Config, workflow: Workflow, overrides: Sequence[str] = (), *, runs: bool = False
) -> list[Finding]:
    """Checks the functions and the first rows of a run as its start would. Functions of the user are imported in a
    child process, and only those that the command line names.

    overrides: KEY=VALUE arguments of the command line.
    runs: whether this is the command line of a run, which needs prompts, and imports no functions.
    """
    keys = {"algorithm", *(word.partition("=")[0] for word in overrides)}
    texts = {"reward_function": config.reward_function, "eval.reward_function": config.eval.reward_function}
    code = {f"reward function {spec}": key for key, text in texts.items() for spec in foreign_functions(text)}
    if config.algorithm.from_file:
        code[f"algorithm {config.algorithm.name}"] = "algorithm"
    unnamed = [name for name, key in code.items() if runs or key not in keys]
    unchecked = dict.fromkeys(unnamed, "name it on the command line of `check`")
    check_all = partial(_input_findings, config, workflow, runs=runs)
    if len(unnamed) == len(code):
        return check_all(unchecked)
    findings = _in_child(partial(check_all, unchecked))
    late = dict.fromkeys(code, f"importing it took more than {IMPORT_S} s, or ended the process")
    return check_all(late | unchecked) if findings is None else findings


def _in_child(check: Callable[[], list[Finding]]) -> list[Finding] | None:
    """Runs a check that imports code of the user in a child process without GPUs. Returns its findings; None if the
    child does not answer."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, check))
    process.start()
    sender.close()
    try:
        findings: list[Finding] | None = receiver.recv() if receiver.poll(IMPORT_S) else None
        return findings
    except EOFError:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _answer(sender: Any, check: Callable[[], list[Finding]]) -> None:
    """Sends the findings of a check from a child process, whose prints are dropped."""
    os.setsid()  # the parent ends the child together with what it has started
    signal.alarm(2 * IMPORT_S)  # in case that the parent has been killed
    os.environ |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    sender.send(check())


def _input_findings(config: Config, workflow: Workflow, unchecked: Mapping[str, str], *, runs: bool) -> list[Finding]:
    """Checks the functions and the first rows of a run.

    unchecked: what may not be imported -> why not.
    runs: see check_inputs.
    """
    findings = [Finding("error", NO_PROMPTS)] if runs and not prompt_files(config) else []
    if config.algorithm.from_file:
        check_page = partial(check_functions, config.algorithm, workflow, config.options)
        findings += _findings_of(f"algorithm {config.algorithm.name}", check_page, unchecked)
    findings += _check_data(config, unchecked)
    if config.eval.prompts:
        new = [finding for finding in _check_data(evaluated(config), unchecked) if finding not in findings]
        findings += _titled(f"evaluation on {config.eval.prompts}", new)
    return findings


def _findings_of(subject: str, check: Callable[[], object], unchecked: Mapping[str, str]) -> list[Finding]:
    """Returns the error that a check raises as a finding; a warning if it is not made. unchecked: see
    _input_findings."""
    reason = unchecked.get(subject, "")
    try:
        if not reason:
            check()
    except (UserError, ModuleNotFoundError) as error:
        cause = error.__cause__ if isinstance(error, UserError) else error
        if not isinstance(cause, ModuleNotFoundError) or cause.name != "torch":
            return [Finding("error", str(error))]
        reason = "it imports torch, which is not installed here"
    return [Finding("warning", f"{subject} is not checked: {reason}")] if reason else []


def _check_data(config: Config, unchecked: Mapping[str, str]) -> list[Finding]:
    """Checks the data set, and that it has the columns that reward functions ask for. Returns findings."""
    from rlhf_spmd.runtime.data.first_rows import check_first_rows

    findings = _findings_of("data", partial(check_first_rows, config), {})
    is_readable = bool(prompt_files(config)) and not findings
    scores = any(role.judge for role in config.algorithm.roles.values())
    for spec in split_functions(config.reward_function) if scores else []:
        check_function = partial(_check_reward, spec, config, is_readable=is_readable)
        findings += _findings_of(f"reward function {spec}", check_function, unchecked)
    return findings


def _check_reward(spec: str, config: Config, *, is_readable: bool) -> None:
    """Raises UserError for a reward function that a run would refuse."""
    from rlhf_spmd.runtime.data.first_rows import NUM_ROWS
    from rlhf_spmd.runtime.rewards.function import load_reward_function

    function = load_reward_function(spec, None)
    if function.asks_for_columns and is_readable:
        try:
            function.bound_to(column_names(config, NUM_ROWS))
        except UserError:  # unless a later row has the column
            function.bound_to(column_names(config))


def column_names(config: Config, most: int | None = None) -> list[str]:
    """Returns the columns of files of prompts that reward functions may ask for. Raises UserError.

    most: number of rows that are read of each file; None: all.
    """
    from rlhf_spmd.runtime.data.readers import SOURCE, read_records

    files, key = prompt_files(config), config.data.key or config.algorithm.prompts
    names = dict.fromkeys([SOURCE] if len(files) > 1 else [])  # a row without data_source is given one
    for path in every_file(files):
        for _, row in read_records(path, key, most=most):
            names |= dict.fromkeys(name for name, value in row.items() if name != key or not isinstance(value, str))
    return list(names)


def refuse_errors(name: str, findings: Sequence[Finding], advice: str = "") -> None:
    """Raises UserError for a strategy whose program cannot run. advice: strategies that can."""
    if errors := [str(finding) for finding in findings if finding.severity == "error"]:
        texts = [f"strategy {name} is refused by check: {'; '.join(errors[:3])}", advice]
        raise UserError(". ".join(filter(None, texts)))
