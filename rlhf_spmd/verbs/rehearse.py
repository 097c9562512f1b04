"""The rehearse subcommand: the processes and messages of a job on this machine, with sleeps in place of computation.

Without mpirun it starts the processes itself. Needs no torch; MPI on the ranks.
"""

import argparse
import os
import resource
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from rlhf_spmd.command_line.words import read_calibrated
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.files import progress
from rlhf_spmd.files.output import print_json
from rlhf_spmd.files.reading import is_folder
from rlhf_spmd.plan.cost.forecast import forecast, times_of
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.text.program_listing import format_bytes
from rlhf_spmd.verbs.draw import MOST_LANES, compile_all

if TYPE_CHECKING:
    from rlhf_spmd.runtime.rehearse.rehearsal import Faults
    from rlhf_spmd.runtime.world.world import World

MOST_BUSY = 0.6  # share of the cores above which processes wait for a core, and not only for one another
BYTES_PER_RANK = 64 * 2**20  # with its two supervisors
MOST_LINKS = 4  # that are shown
PROCESSES_PER_RANK, FILES_PER_RANK = 3, 8  # the launcher holds the files


def launch(parsed: argparse.Namespace, words: Sequence[str]) -> NoReturn:
    """Replaces this process by mpirun with as many ranks as the layout has. Raises UserError."""
    config, cluster, _ = read_calibrated(parsed)
    num = cluster.num_devices
    check_room(num)  # before the program, which takes minutes for thousands of ranks
    ((_, program),) = compile_all([parsed.strategy], make_workload(config), cluster, config.strategy).items()
    faults_of(parsed, program)
    check_folder(parsed.out)
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise UserError(f"there is no mpirun in PATH: start the rehearsal with your launcher, on {num} ranks")
    more = {
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    command = [mpirun, "-n", str(num), sys.executable, "-m", "rlhf_spmd", *words]
    progress.stop()  # its line would stay before the first one of the ranks
    sys.stdout.flush()
    os.execve(mpirun, command, {**os.environ, **more})


def check_room(num_ranks: int) -> None:
    """Raises UserError if this machine has not enough memory, processes or open files for so many ranks."""
    needed, free = num_ranks * BYTES_PER_RANK, psutil.virtual_memory().available
    smaller = "rehearse a smaller layout, e.g. with fewer nodes"
    if needed > free:
        text = f"{num_ranks} ranks need {format_bytes(needed)} of memory, and {format_bytes(free)} are free: {smaller}"
        raise UserError(text)
    limits = (
        ("processes (ulimit -u)", resource.RLIMIT_NPROC, PROCESSES_PER_RANK),
        ("open files (ulimit -n)", resource.RLIMIT_NOFILE, FILES_PER_RANK),
    )
    for what, limit, per_rank in limits:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and num_ranks * per_rank > soft:
            raise UserError(f"{num_ranks} ranks need {num_ranks * per_rank} {what}, and {soft} are allowed: {smaller}")


def check_folder(out: str | None) -> None:
    """Raises UserError if --out names a file, or a folder with files, such as that of a run, whose records would be
    replaced."""
    if out is None:
        return
    if not out.strip():
        raise UserError("--out is empty: name a new folder")
    folder = Path(out)
    if is_folder(folder) and any(folder.iterdir()):
        raise UserError(f"--out {out}: the folder is not empty: name a new one")
    if folder.exists() and not is_folder(folder):
        raise UserError(f"--out {out} is a file: name a new folder")


def faults_of(parsed: argparse.Namespace, program: Program) -> "Faults":
    """Returns what --kill, --slow and --drop name. Raises UserError."""
    from rlhf_spmd.runtime.rehearse.rehearsal import Faults

    ranks, calls = program.cluster.ranks, [call.name for call in program.workload.workflow.placed_calls]
    kill = None
    if parsed.kill:
        rank, _, call = parsed.kill.partition("@")
        if not rank.isdecimal() or int(rank) not in ranks or call not in calls:
            raise UserError(
                f"--kill {parsed.kill}: give RANK@CALL, a rank below {len(ranks)} and one of {', '.join(calls)}"
            )
        if int(rank) not in program.placement.layouts[call].ranks:
            raise UserError(f"--kill {parsed.kill}: rank {rank} does not run {call}")
        kill = int(rank), call
    slow = []
    for text in parsed.slow:
        rank, _, factor = text.partition("=")
        try:
            slow.append((int(rank), float(factor)))
        except ValueError:
            raise UserError(f"--slow {text}: give RANK=FACTOR, e.g. 3=2") from None
        if slow[-1][0] not in ranks or not 0 < slow[-1][1] < float("inf"):
            raise UserError(f"--slow {text}: the rank must be below {len(ranks)}, the factor above 0")
    whats = dict.fromkeys(moved.what for moved in program.transfers)
    if parsed.drop and not any(parsed.drop in what for what in whats):
        raise UserError(
            f"--drop {parsed.drop}: no message has this in its name; there are: {'; '.join(whats) or 'none'}"
        )
    return Faults(kill, tuple(slow), parsed.drop or None)


def run(world: "World", parsed: argparse.Namespace) -> int:
    """Rehearses on all ranks; rank 0 prints -> the exit status."""
    from rlhf_spmd.runtime.rehearse.rehearsal import Rehearsal, Rehearsed, expanded
    from rlhf_spmd.runtime.world.trace import Tracer

    with world.together("reading the program"):
        config, cluster, calibration = read_calibrated(parsed)
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
    say = partial(print, flush=True) if world.rank == 0 else _nothing
    title = f"rehearsal of {name}, preset {config.title} on {cluster}"
    say(f"{title}: {world.size} processes; a second here stands for {factor:.3g} s by calibration {calibration.name}")
    recorder = Tracer(world.rank, world.hosts[world.rank])
    ahead, num = program.placement.ahead, parsed.iterations
    rehearsal = Rehearsal(expanded(program), world, recorder, times, factor, faults)
    if parsed.out:
        world.keep_records(parsed.out)
    seconds, busy_s, answers = [], [], []
    batches = [Rehearsed(number) for number in range(num + ahead)]
    if ahead:
        rehearsal.iteration(None, batches[0])
    for number in range(num):
        world.barrier("the start of an iteration")
        began_s, before_s = time.monotonic(), time.process_time()
        answers = rehearsal.iteration(*batches[number : number + 1 + ahead])
        seconds.append((time.monotonic() - began_s) * factor)
        busy_s.append(time.process_time() - before_s)
        against = f"forecast {forecast_s:.4g} s ({seconds[-1] / forecast_s - 1:+.1%})"
        say(f"iteration {number + 1} of {num}: {seconds[-1]:.4g} s, {against}")
        batches[number].rows.clear()
    if ahead:
        rehearsal.iteration(batches[-1])
        say(f"A first batch was drawn before, and a last one, {num + 1}, trained after these.")
    busy = [sum(some) for some in zip(*world.allgather(busy_s, "processor seconds"), strict=True)]
    if parsed.out:
        records = world.allgather(recorder.to_records(), "the timeline")
        if world.rank == 0:
            draw(Path(parsed.out), records, title, program)
    if world.rank == 0:
        result = summary(seconds, busy, answers, forecast_s, factor)
        first = {"strategy": name, "layout": str(cluster), "preset": config.preset, "calibration": calibration.name}
        print_json(first | result | {"out": parsed.out, "ok": True}, parsed.json)
    return 0


def _nothing(text: str) -> None:
    """Prints nothing."""


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
    busy_s: Sequence[float],
    answers: Sequence[Mapping[str, Sequence[Sequence[int]]]],
    forecast_s: float,
    factor: float,
) -> dict[str, Any]:
    """Prints what a rehearsal found, and returns it.

    seconds, busy_s: of the iterations, there and here.
    """
    median_s, cores = statistics.median(seconds), len(os.sched_getaffinity(0))
    share = sum(busy_s) * factor / sum(seconds) / cores
    links: Counter[tuple[int, int]] = Counter()  # nodes of sender and receiver -> bytes
    for source, destination, size in (one for answer in answers for one in answer["sent_bytes"]):
        links[source, destination] += size
    within = sum(size for (source, destination), size in links.items() if source == destination)
    between = {link: size for link, size in links.items() if link[0] != link[1]}
    print(f"median {median_s:.4g} s, forecast {forecast_s:.4g} s: {median_s / forecast_s - 1:+.1%}")
    print(
        f"messages of an iteration: {format_bytes(within)} within nodes, {format_bytes(sum(between.values()))} between"
    )
    for (source, destination), size in sorted(between.items(), key=itemgetter(1), reverse=True)[:MOST_LINKS]:
        print(f"  node {source} to node {destination}: {format_bytes(size)}")
    print(f"processors: {sum(busy_s):.1f} s of all ranks, {share:.0%} of {cores} cores", end="")
    print("; that is too much to trust the seconds: give a larger --seconds" if share > MOST_BUSY else "")
    print("No rank hung, and every row was there when it was read.")
    return {
        "rehearsed_s": list(seconds),
        "forecast_s": forecast_s,
        "processor_s": sum(busy_s),
        "processor_share": share,
        "bytes_within_nodes": within,
        "bytes_between_nodes": sum(between.values()),
        "bytes_of_links": {f"{source}-{destination}": size for (source, destination), size in sorted(between.items())},
    }
