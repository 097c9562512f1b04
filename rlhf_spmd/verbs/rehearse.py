"""The rehearse subcommand: the processes and messages of a job on this machine, with sleeps in place of computation.

Without mpirun it starts the processes itself. Needs no torch; MPI on the ranks.
"""

import argparse
import os
import re
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from rlhf_spmd.command_line.fitting_strategies import compile_all
from rlhf_spmd.command_line.words import read
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.files import progress
from rlhf_spmd.files.output import print_json
from rlhf_spmd.files.reading import is_folder
from rlhf_spmd.plan.cost.forecast import forecast, times_of
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.text.program_listing import format_bytes

if TYPE_CHECKING:
    from rlhf_spmd.runtime.rehearse.rehearsal import Faults
    from rlhf_spmd.runtime.world.world import World

MOST_BUSY = 0.6  # share of the cores above which processes wait for a core, and not only for one another
BYTES_PER_RANK = 64 * 2**20  # with its two supervisors
MOST_LINKS = 4  # that are shown
MOST_LANES = 16  # of the timeline; with more ranks, those that do the same share a lane
FACTOR = re.compile(r"\d+(\.\d+)?")


def launch(parsed: argparse.Namespace, words: Sequence[str]) -> NoReturn:
    """Replaces this process by mpirun with as many ranks as the layout has. Raises UserError."""
    config, cluster, _ = read(parsed)
    check_room(cluster.num_devices)  # before the program, which takes minutes for thousands of ranks
    ((_, program),) = compile_all([parsed.strategy], make_workload(config), cluster, config.strategy).items()
    faults_of(parsed, program)
    check_folder(parsed.out)
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise UserError(f"there is no mpirun in PATH: start the rehearsal on {cluster.num_devices} ranks")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    environ["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    command = [mpirun, "-n", str(cluster.num_devices), sys.executable, "-m", "rlhf_spmd", *words]
    progress.stop()  # its line would stay before the first one of the ranks
    sys.stdout.flush()
    os.execve(mpirun, command, environ)


def check_room(num_ranks: int) -> None:
    """Raises UserError if this machine has not enough memory for so many ranks."""
    needed, free = num_ranks * BYTES_PER_RANK, psutil.virtual_memory().available
    if needed > free:
        text = f"{num_ranks} ranks need {format_bytes(needed)} of memory, and {format_bytes(free)} are free"
        raise UserError(f"{text}: rehearse a smaller layout, e.g. with fewer nodes")


def check_folder(out: str | None) -> None:
    """Raises UserError if --out names a file, or a folder with files, such as that of a run, whose records would be
    replaced."""
    if out is not None and (not out.strip() or Path(out).exists()) and not (is_folder(out) and not os.listdir(out)):
        raise UserError(f"--out {out!r} is not new: name a new folder")


def faults_of(parsed: argparse.Namespace, program: Program) -> "Faults":
    """Returns what --kill, --slow and --drop name. Raises UserError."""
    from rlhf_spmd.runtime.rehearse.rehearsal import Faults

    calls = {call.name: program.placement.layouts[call.name].ranks for call in program.workload.workflow.placed_calls}
    kill, slow = None, []
    if parsed.kill:
        rank, _, call = parsed.kill.partition("@")
        if rank not in map(str, calls.get(call, ())):
            names = "; ".join(f"{name} on {list(ranks)}" for name, ranks in calls.items())
            raise UserError(f"--kill {parsed.kill}: give RANK@CALL, a rank of a call: {names}")
        kill = int(rank), call
    for text in parsed.slow:
        rank, _, factor = text.partition("=")
        if rank not in map(str, program.cluster.ranks) or not FACTOR.fullmatch(factor) or not float(factor):
            most = program.cluster.num_devices
            raise UserError(f"--slow {text}: give RANK=FACTOR, a rank below {most} and a factor above 0")
        slow.append((int(rank), float(factor)))
    messages = dict.fromkeys(moved.what for moved in program.transfers)
    if parsed.drop and not any(parsed.drop in message for message in messages):
        raise UserError(f"--drop {parsed.drop}: no message has this in its name; there are: {'; '.join(messages)}")
    return Faults(kill, tuple(slow), parsed.drop or None)


def run(world: "World", parsed: argparse.Namespace) -> int:
    """Rehearses on all ranks; rank 0 prints -> the exit status."""
    from rlhf_spmd.runtime.rehearse.rehearsal import Rehearsal, Rehearsed, expanded
    from rlhf_spmd.runtime.world.trace import Tracer

    with world.together("reading the program"):
        config, cluster, calibration = read(parsed)
        assert calibration is not None, "required"
        if world.size != cluster.num_devices or world.num_nodes > 1:
            started = f"{world.size} ranks on {world.num_nodes} nodes were started"
            raise UserError(f"a rehearsal of {cluster} needs {cluster.num_devices} ranks of one machine; {started}")
        ((name, program),) = compile_all([parsed.strategy], make_workload(config), cluster, config.strategy).items()
        forecast_s, times = forecast(program, calibration).makespan_s, times_of(program, calibration)
        faults, factor = faults_of(parsed, program), forecast_s / parsed.seconds
        if parsed.out and world.rank == 0:
            check_folder(parsed.out)
            Path(parsed.out).mkdir(parents=True, exist_ok=True)
    world.set_deadline(parsed.deadline)
    title = f"rehearsal of {name}, preset {config.title} on {cluster}"
    stands = f"a second here stands for {factor:.3g} s by calibration {calibration.name}"
    _say(world, f"{title}: {world.size} processes; {stands}")
    recorder = Tracer(world.rank, world.hosts[world.rank])
    ahead, chains, num = program.placement.ahead, program.chains, parsed.iterations
    rehearsal = Rehearsal(expanded(program), world, recorder, times, factor, faults)
    if parsed.out:
        world.keep_records(parsed.out)
    seconds, busy_s, answers = [], [], []
    batches = [Rehearsed(number) for number in range(num + ahead)]
    if ahead:
        rehearsal.iteration(batches[0])
    for number in range(num):
        if not chains:
            world.barrier("the start of an iteration")
        began_s, before_s = time.monotonic(), time.process_time()
        now = number + ahead
        answers = rehearsal.iteration(batches[now], batches[now - 1] if program.overlaps and now else None)
        seconds.append((time.monotonic() - began_s) * factor)
        busy_s.append(time.process_time() - before_s)
        against = f"forecast {forecast_s:.4g} s ({seconds[-1] / forecast_s - 1:+.1%})"
        _say(world, f"iteration {number + 1} of {num}: {seconds[-1]:.4g} s, {against}")
        batches[number].rows.clear()
    if chains:
        answers = rehearsal.iteration(None, batches[-1])
        _say(world, "Each iteration began on a rank when that could; seconds are those of rank 0.")
    if ahead:
        rehearsal.iteration(None, batches[-1])
        _say(world, f"A first batch was sampled before, and a last one, {num + 1}, trained after these.")
    processor_s = sum(map(sum, world.allgather(busy_s, "processor seconds")))
    records = world.allgather(recorder.to_records(), "the timeline") if parsed.out else []
    if world.rank == 0:
        if parsed.out:
            draw(Path(parsed.out), records, title, program)
        result = summary(seconds, processor_s, answers, forecast_s, factor)
        first = {"strategy": name, "layout": str(cluster), "preset": config.preset, "calibration": calibration.name}
        print_json(first | result | {"out": parsed.out, "ok": True}, parsed.json)
    return 0


def _say(world: "World", text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def draw(folder: Path, records: Sequence[Mapping[str, object]], title: str, program: Program) -> None:
    """Writes the timeline, as that of a run."""
    from rlhf_spmd.runtime.pictures.timeline import write_png
    from rlhf_spmd.runtime.world.trace import write_chrome

    write_chrome(folder / "timeline.json", records, about={"title": title})
    lanes = {"most_lanes": MOST_LANES, "num_iterations": 1}
    write_png(folder / "timeline.png", records, title=title, workflow=program.workload.workflow, **lanes)
    print(f"The timeline is in {folder / 'timeline.png'}, its numbers in timeline.json")


def summary(
    seconds: Sequence[float],
    processor_s: float,
    answers: Sequence[Mapping[str, Sequence[Sequence[int]]]],
    forecast_s: float,
    factor: float,
) -> dict[str, Any]:
    """Prints what a rehearsal found, and returns it.

    seconds: of the iterations, as they stand for those of the job.
    processor_s: of all ranks here.
    """
    median_s, cores = statistics.median(seconds), len(os.sched_getaffinity(0))
    share = processor_s * factor / sum(seconds) / cores
    links: Counter[tuple[int, int]] = Counter()  # nodes of sender and receiver -> bytes
    for answer in answers:
        for source, destination, size in answer["sent_bytes"]:
            links[source, destination] += size
    between = Counter({link: size for link, size in links.items() if link[0] != link[1]})
    within = links.total() - between.total()
    print(f"median {median_s:.4g} s, forecast {forecast_s:.4g} s: {median_s / forecast_s - 1:+.1%}")
    print(f"messages of an iteration: {format_bytes(within)} within nodes, {format_bytes(between.total())} between")
    for (source, destination), size in between.most_common(MOST_LINKS):
        print(f"  node {source} to node {destination}: {format_bytes(size)}")
    print(f"processors: {processor_s:.1f} s of all ranks, {share:.0%} of {cores} cores")
    if share > MOST_BUSY:
        print("That is too much to trust the seconds: give a larger --seconds")
    print("No rank hung, and every row was there when it was read.")
    return {
        "rehearsed_s": list(seconds),
        "forecast_s": forecast_s,
        "processor_s": processor_s,
        "processor_share": share,
        "bytes_within_nodes": within,
        "bytes_between_nodes": between.total(),
        "bytes_of_links": {f"{source}-{destination}": size for (source, destination), size in sorted(between.items())},
    }
