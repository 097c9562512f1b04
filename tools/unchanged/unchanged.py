"""Does the working tree compute what an earlier commit computed? Tokens, weights, metrics, programs, forecasts, plans.

For refactorings, which may not change a bit. Thirteen small runs of the real program (six placements in float32 and in
bfloat16, and one that is stopped and resumed) must leave the same hashes of responses, the same bits of weights and
moments, and the same metrics; twenty programs must be the same instruction by instruction, with what `check` finds,
bytes and simulated seconds; two searches must end with the same plans. Six sessions do the same for what is not PPO
(sessions.py), and for tokens of data sets. What was renamed on purpose is in RENAMES (compare.py). A worktree of the
commit, made for this and removed afterwards, runs its own copy of this tool (`--write FOLDER --only PART`, which must
go on to mean the same), so that each tree uses its own names. What a commit computed is kept in .cache/unchanged/ for
the next time on the same machine.

With --speed instead: does the working tree take more processor time for the same work (speed.py)?

Cost: on two cores three and a half minutes, half of it where the commit is in the cache; ten seconds for
--only programs; with --speed half an hour. Commands: python -m tools unchanged COMMIT [--only PART] [--record], or
python -m tools unchanged COMMIT --speed [--record]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from bench.rows import REPOSITORY, RESULTS, add
from tools.unchanged.compare import Golden, compare

PARTS = ("programs", "runs", "sessions")
CACHE = REPOSITORY / ".cache" / "unchanged"
LIMIT_S = 1800.0  # of one part in one tree


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools unchanged", description=__doc__.partition("\n")[0])
    parser.add_argument("commit", nargs="?", help="what the working tree is compared with")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument("--record", action="store_true", help="append a row to bench/results/unchanged.jsonl")
    parser.add_argument("--speed", action="store_true", help="compare processor time instead")
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="write what this tree computes, and compare nothing"
    )
    parsed = parser.parse_args(arguments)
    parts = PARTS if parsed.only is None else (parsed.only,)
    if parsed.write:
        return write(parsed.write, parts)
    if parsed.commit is None:
        parser.error("give the commit that the working tree is compared with, e.g. HEAD")
    commit = sha_of(parsed.commit)
    row = {"bench": "unchanged", "since": commit}
    row |= speed(commit) if parsed.speed else bits(commit, parts)
    if parsed.record:
        add("unchanged", [row], RESULTS)
    print(json.dumps(row))
    return 0 if row["ok"] else 1


def bits(commit: str, parts: tuple[str, ...]) -> dict:
    """Compares the results of both trees -> fields of the row."""
    differences = {}
    for part in parts:
        old, old_s = of_commit(commit, part)
        new, new_s = of_tree(REPOSITORY, part)
        print(f"{part}: {old_s:.0f} s for {commit[:10]}{'' if old_s else ' (cached)'}, {new_s:.0f} s for this tree")
        found = compare(old, new)
        for case, text in found.items():
            print(f"  {case}: {'equal' if text is None else f'DIFFERENT: {text}'}", flush=True)
        differences |= found
    num = sum(text is not None for text in differences.values())
    row = {"parts": list(parts), "cases": len(differences), "different": num}
    return row | {"ok": bool(differences) and not num}


def speed(commit: str) -> dict:
    """Compares the processor time of both trees -> fields of the row."""
    from tools.unchanged import speed

    with worktree(commit) as tree:
        # a checkout that is installed has kernels in C++; without them the other tree would choose another library
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=tree, check=True, capture_output=True)
        works = speed.compare(tree, REPOSITORY, run_in)
    return {"works": works, "ok": all(work["ok"] for work in works)}


# ---- what a tree computes --------------------------------------------------------------------------------------------


def write(folder: Path, parts: tuple[str, ...]) -> int:
    """Writes FOLDER/PART.json for each part: the results of the tree in which this process runs."""
    assert_from(REPOSITORY)
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if part == "programs":
            from tools.unchanged.programs import goldens

            found: Mapping[str, Golden] = goldens()
        else:
            from tools.unchanged import runs, sessions

            with tempfile.TemporaryDirectory(prefix=f"unchanged_{part}_") as folder_of_runs:
                found = (runs if part == "runs" else sessions).goldens(Path(folder_of_runs))
        (folder / f"{part}.json").write_text(json.dumps(found, indent=0), encoding="utf-8")
    print(json.dumps({"bench": "unchanged", "written": str(folder), "ok": True}))
    return 0


def assert_from(tree: Path) -> None:
    """Asserts that the modules are those of a tree, not those of the checkout that is installed."""
    import bench
    import rlhf_spmd
    import rlhf_spmd.kernels
    import rlhf_spmd.strategies
    import tools

    wanted = os.environ.get("UNCHANGED_TREE", str(tree))
    for module in (bench, tools, rlhf_spmd, rlhf_spmd.kernels, rlhf_spmd.strategies):
        assert Path(module.__file__).resolve().is_relative_to(Path(wanted).resolve()), (module.__file__, wanted)


def of_tree(tree: Path, part: str) -> tuple[dict[str, Golden], float]:
    """Returns the results of a tree by its own copy of this tool, and the seconds that it took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unchanged_") as folder:
        run_in(tree, ["unchanged", "--write", folder, "--only", part])
        return json.loads((Path(folder) / f"{part}.json").read_text(encoding="utf-8")), time.monotonic() - began


def run_in(tree: Path, arguments: list[str]) -> str:
    """Runs `python -m tools ARGUMENTS` of a tree, by this interpreter, and returns its standard output. Raises if it
    fails."""
    # a tree's own folder comes before the finder of an editable install, also in the ranks that it starts
    environment = os.environ | {"PYTHONPATH": str(tree), "UNCHANGED_TREE": str(tree)}
    package = "tools" if (tree / "tools" / "__main__.py").exists() else "bench"  # where earlier commits have it
    command = [sys.executable, "-m", package, *arguments]
    told = {"capture_output": True, "text": True, "timeout": LIMIT_S, "check": False}
    done = subprocess.run(command, cwd=tree, env=environment, **told)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} in {tree} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


# ---- an earlier commit -----------------------------------------------------------------------------------------------


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=REPOSITORY, capture_output=True, encoding="utf-8", errors="replace", check=True
    ).stdout.strip()


def sha_of(commit: str) -> str:
    """Returns the full hash of a commit that has this tool."""
    try:
        sha = git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    except subprocess.CalledProcessError:
        sys.exit(f"tools unchanged: {commit} is not a commit of this repository")
    if not git("ls-tree", sha, "tools/__main__.py", "bench/numbers/unchanged.py"):
        sys.exit(f"tools unchanged: {commit} does not have this tool; compare with a later commit")
    return sha


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Checks a commit out into a folder of its own, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="unchanged_tree_") as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))
            git("worktree", "prune")


def of_commit(commit: str, part: str) -> tuple[dict[str, Golden], float]:
    """Returns what a commit computes, and the seconds that it took: 0 where it comes from the cache."""
    path = CACHE / commit / f"{part}.json"
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["machine"] == machine():
            return kept["goldens"], 0.0
    with worktree(commit) as tree:
        found, seconds = of_tree(tree, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "goldens": found}), encoding="utf-8")
    return found, seconds


def machine() -> dict[str, str]:
    """Returns the properties of the machine on which bits may depend."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    told = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in info}
    about = {name: told.get(name, "") for name in ("model name", "flags")}
    versions = {name: version(name) for name in ("torch", "numpy", "deepspeed", "transformers")}
    return about | versions | {"python": platform.python_version(), "cores": str(os.cpu_count())}
