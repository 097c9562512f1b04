"""The rules of the house: imports point one way, heavy packages stay behind one file each, folders and functions stay
short, and text files have one encoding (text_rules.py).

`problems_of` reads a tree and names what breaks them; tests/unit/house/test_import_rules.py asks it about this
repository.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.text_rules import text_problems, word_problems

ROOT = Path(__file__).parents[1]
# Folders of the package, by the name they install under.
FOLDERS = {"rlhf_spmd": "rlhf_spmd", "kernels": "rlhf_spmd.kernels", "strategies": "rlhf_spmd.strategies"}
FOLDERS |= {"bench": "bench"}
BESIDE = ("tests", "tools")  # folders that import anything, but keep their files and functions as short
MAX_FILES = 12  # of a folder
LISTS = (
    "rlhf_spmd/algorithms",
    "rlhf_spmd/verbs",
    "kernels",
    "strategies",
    "bench",
    "tests",
    "tools",
)  # a file for each thing
LOOSE = (
    "rlhf_spmd/__init__.py",
    "rlhf_spmd/__main__.py",
    "rlhf_spmd/errors.py",
    "rlhf_spmd/rewards.py",
    "rlhf_spmd/tools.py",
)
ANYTHING = ("",)

# Rooms -> what they import of the code below them; a room also imports itself and the rooms above it, nothing else.
RUNTIME: dict[str, tuple[str, ...]] = {
    "failure": ("files", "plan"),
    "world": ("files", "plan"),
    "data": (
        *("config.options", "config.model_folders", "files", "kernels", "model", "plan.runtime_words", "plan.workflow"),
        *("pages.option_suggestions", "pages.option_values", "pages.user_module"),
    ),
    "workers": ("files",),
    "rewards": (
        *("config.options", "config.model_folders", "files", "model", "plan.runtime_words"),
        *("pages.named_objects", "pages.option_suggestions", "pages.user_module"),
    ),
    "generation": ("kernels", "model", "plan"),
    "environments": ("config.file", "files", "model", "pages.named_objects", "pages.option_suggestions", "tools"),
    "engines": ("kernels", "model", "plan"),
    "weights": ("config.options", "kernels", "config.model_folders", "model", "plan"),
    "execute": (
        *("pages.algorithm", "pages.functions", "pages.user_module"),
        *("algorithms", "config.options", "kernels", "model", "plan"),
    ),
    "rehearse": ("plan",),
    "checkpoint": (
        *(
            "pages.algorithm",
            "pages.option_tree",
            "pages.option_values",
            "config.options",
            "config.checks",
            "config.file",
            "files",
            "model",
            "plan",
        ),
    ),
    "profile": ("config.options", "config.model_folders", "files", "kernels", "model", "plan"),
    "pictures": ("files", "plan"),
    "records": ("pages.algorithm", "algorithms", "config.options", "files", "kernels", "plan"),
    "run": (
        *(
            "pages.algorithm",
            "algorithms",
            "config.options",
            "config.epochs",
            "config.forecast_episodes",
            "config.evaluation_metrics",
            "config.metric_aliases",
            "config.presets",
        ),
        *("files", "kernels", "model", "plan"),
    ),
    "offline": (
        *("algorithms", "config.options", "files", "kernels", "model", "config.model_folders"),
        *("pages.option_tree", "pages.option_values", "plan"),
    ),
}
SEEN_BY_STRATEGIES = tuple(
    f"plan.{name}"
    for name in (
        "adapters",
        "cluster",
        "shard",
        "layout",
        "runtime_words",
        "workflow",
        "workload",
        "placement",
        "validate",
    )
)
PLAN: dict[str, tuple[str, ...]] = dict.fromkeys(("program", "cost", "proof", "search", "text"), SEEN_BY_STRATEGIES)
SHARED = tuple(
    f"bench.{name}"
    for name in (
        "rows",
        "cells",
        "evidence",
        "ahead_tables",
        "baseline_tables",
        "stage_tables",
        "recipe_tables",
        "columns",
        "tables",
    )
)  # each those before it
BENCH: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("speed", "forecast", "numbers", "faults", "first_light", "against_trl", "against_vllm"), SHARED
)


def rooms(package: str, table: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Returns a line for each room: what it may import."""
    names, short = list(table), package.removeprefix("rlhf_spmd.")
    return {
        f"{package}.{name}": (*table[name], *(f"{short}.{above}" for above in names[:number]))
        for number, name in enumerate(names, 1)
    }


MATH = (
    "advantages",
    "group_advantages",
    "masks",
    "logprob_parity",
    "importance",
    "surrogates",
    *("likelihood", "preferences"),
)
BELOW_PAGES = ("user_module", "option_suggestions", "option_values")
PAGES = ("plan", *(f"algorithms.{name}" for name in ("page", "controllers", "off_policy", "policy_gradient")))
TENSOR_MATH = tuple(f"algorithms.{name}" for name in ("controllers", *MATH))
# module or package -> what of ours it may import (beside errors); the longest matching name counts.
OURS: dict[str, tuple[str, ...]] = {
    "rlhf_spmd": (),
    "rlhf_spmd.__main__": ANYTHING,  # but late, see LAZY
    # it finds the others by name
    "rlhf_spmd.pages.algorithm": (*("plan", "algorithms.page", "pages.functions", "pages.user_module"),),
    "rlhf_spmd.pages.functions": ("plan",),
    "rlhf_spmd.algorithms": PAGES,
    "rlhf_spmd.algorithms.page": (),
    "rlhf_spmd.algorithms.controllers": (),
    "rlhf_spmd.algorithms.training_order": (),
    "rlhf_spmd.config.metric_aliases": (),
    **{f"rlhf_spmd.algorithms.{name}": TENSOR_MATH for name in MATH},
    # the words that their options may have
    **{f"rlhf_spmd.algorithms.{name}": (*TENSOR_MATH, "algorithms.page") for name in ("importance", "surrogates")},
    "rlhf_spmd.machines.calibration_file": ("plan", "files", "pages.option_suggestions"),
    "rlhf_spmd.machines.cluster_calibration": ("plan", "machines.calibration_file"),
    "rlhf_spmd.machines.cluster_file": ("files", "plan"),
    "rlhf_spmd.config.options": (
        "plan",
        "config.lora",
        "pages.algorithm",
        "algorithms.page",
        "files",
        "config.model_folders",
        "model.adapters.uniform",
        "pages.option_tree",
        "pages.option_values",
        "config.role_shapes",
        "config.forecast_episodes",
        "config.forecast_lengths",
        "model.texts.tokenizer_files",
    ),
    "rlhf_spmd.config.forecast_episodes": ("files", "plan.workload"),
    "rlhf_spmd.config.forecast_lengths": ("files", "plan.workload", "runtime.data.readers"),
    "rlhf_spmd.config.file": ("files", "config.checks", "pages.option_tree", "pages.option_values"),
    "rlhf_spmd.config.epochs": ("config.options",),
    "rlhf_spmd.command_line": (
        *("algorithms.page", "command_line", "config", "files", "machines", "pages", "plan"),
        *("runtime.data", "runtime.failure", "runtime.offline"),
        *("runtime.rewards", "runtime.world"),
    ),
    "rlhf_spmd.embedded": (),
    "rlhf_spmd.config.lora": ("plan", "pages.option_tree"),
    "rlhf_spmd.model.adapters.config": ("files",),
    "rlhf_spmd.model.adapters.uniform": (
        *("files", "model.adapters.config", "model.config", "model.texts.tokenizer_files", "plan.adapters"),
    ),
    "rlhf_spmd.config.model_folders": ("plan", "model.adapters.uniform", "model.config", "model.texts.tokenizer_files"),
    "rlhf_spmd.kernels": ("kernels",),
    "rlhf_spmd.model": ("files", "model", "kernels", "plan.adapters", "plan.shard"),
    "rlhf_spmd.model.config": ("files",),
    "rlhf_spmd.model.texts.tokenizer_files": ("files", "model.config"),
    "rlhf_spmd.config.evaluation_metrics": (),
    "rlhf_spmd.config.checks": (
        *("config.options", "config.evaluation_metrics", "model.adapters.uniform", "pages.option_tree", "plan"),
        *("pages.option_suggestions", "pages.option_values"),
    ),
    "rlhf_spmd.migration": (
        *("config.file", "files", "migration", "pages.algorithm", "pages.other_names", "plan.workload"),
    ),
    "rlhf_spmd.pages.option_suggestions": ("pages.other_names",),
    "rlhf_spmd.pages.other_names": (),
    "rlhf_spmd.pages.option_values": (),
    "rlhf_spmd.pages.option_tree": ("pages.option_suggestions", "pages.option_values"),
    "rlhf_spmd.plan": SEEN_BY_STRATEGIES,
    "rlhf_spmd.config.presets": (
        "plan",
        "pages.algorithm",
        "algorithms.page",
        "config.options",
        "config.file",
        "embedded",
        "model.adapters.uniform",
        "model.config",
        "config.checks",
        "pages.option_suggestions",
        "pages.option_tree",
        "config.role_shapes",
    ),
    "rlhf_spmd.config.role_shapes": ("plan", "pages.option_suggestions"),
    "rlhf_spmd.runtime": (),
    "rlhf_spmd.strategies": ("plan",),
    **dict.fromkeys(("rlhf_spmd.strategies.separation", "rlhf_spmd.strategies.heterogeneous"), ("plan", "strategies")),
    "rlhf_spmd.pages.strategy": ("plan", "strategies", *(f"pages.{name}" for name in BELOW_PAGES)),
    "rlhf_spmd.files": ("files",),
    "rlhf_spmd.pages.user_module": ("files", "pages.option_suggestions", "runtime.failure.signals"),
    "rlhf_spmd.pages.named_objects": ("files", "pages.user_module", "runtime.failure.signals"),
    "rlhf_spmd.verbs": ANYTHING,
    **rooms("rlhf_spmd.plan", PLAN),
    **rooms("rlhf_spmd.runtime", RUNTIME),
}
BENCH_ROOMS = {"bench": ANYTHING} | {name: SHARED[:number] for number, name in enumerate(SHARED)}
BENCH_ROOMS |= rooms("bench", BENCH)
# The same for other people's packages; None: any but those behind a fence.
OTHERS: dict[str, tuple[str, ...] | None] = {
    "rlhf_spmd": (),
    "rlhf_spmd.__main__": None,
    "rlhf_spmd.algorithms": ("pydantic",),  # of the pages, too: what reads them starts without torch
    "rlhf_spmd.algorithms.controllers": (),
    "rlhf_spmd.algorithms.training_order": ("numpy",),
    **{f"rlhf_spmd.algorithms.{name}": ("torch",) for name in MATH},
    "rlhf_spmd.machines.calibration_file": ("pydantic",),
    "rlhf_spmd.machines.cluster_file": ("pydantic",),
    "rlhf_spmd.config.lora": ("pydantic",),
    "rlhf_spmd.config.options": ("pydantic",),
    "rlhf_spmd.config.file": ("yaml",),
    "rlhf_spmd.kernels": None,
    "rlhf_spmd.model": None,
    "rlhf_spmd.model.config": (),
    "rlhf_spmd.model.texts.tokenizer_files": ("tokenizers",),
    "rlhf_spmd.pages.algorithm": ("pydantic",),
    "rlhf_spmd.pages.option_values": ("pydantic",),
    "rlhf_spmd.plan": ("numpy",),
    "rlhf_spmd.rewards": ("httpx", "vaderSentiment", "math_verify"),
    "rlhf_spmd.runtime": None,
    "rlhf_spmd.verbs.rehearse": ("psutil",),
}
FENCES = {
    "mpi4py": "rlhf_spmd.runtime.world.world",
    "deepspeed": "rlhf_spmd.runtime.engines.deepspeed_engine",
    "transformers": "rlhf_spmd.model.hf",
    "triton": "rlhf_spmd.kernels",
    "wandb": "rlhf_spmd.runtime.records.loggers",
    "yaml": "rlhf_spmd.config.file",
}
LAZY = "rlhf_spmd.__main__"  # at module level it imports errors and the standard library, nothing else
NOT_PACKAGES = (
    "tests",
    "bench",
    "tools",
    "kernels",
    "strategies",
)  # folders of this repository that nobody imports by that name
NO_FILES = "rlhf_spmd.plan"
OPENERS = ("os", "io", "pathlib", "shutil", "tempfile", "glob", "fileinput", "subprocess", "socket", "mmap", "sqlite3")
OPENING = ("open", "load", "save", "loadtxt", "savetxt", "genfromtxt", "fromfile", "tofile", "memmap")
OPENING += ("read_text", "write_text", "read_bytes", "write_bytes")


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    late: bool  # inside a function


def modules_of(root: Path) -> dict[str, Path]:
    """Returns every module of the package by its dotted name; a package is named like its __init__."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imports_of(tree: ast.Module, module: str, is_package: bool, known: set[str]) -> Iterator[Import]:
    """Yields all imports, also inside functions, under TYPE_CHECKING, relative, and by import_module("name")."""
    package = module if is_package else module.rpartition(".")[0]
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, late = todo.pop()
        inside = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        todo += [(child, inside) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in known else base, node.lineno, late)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield Import(target.value, node.lineno, late)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def rule(table: dict, module: str):
    return table[max((name for name in table if within(module, name)), key=len)]


def import_problem(module: str, found: Import) -> str | None:
    """Returns why `module` may not import this; None if it may."""
    target, top = found.module, found.module.partition(".")[0]
    if within(target, "rlhf_spmd"):
        if module == LAZY and not found.late and target != "rlhf_spmd.errors":
            return f"imports {target} at module level; import it where it is used"
        allowed = (*rule(OURS, module), "errors")
        if ANYTHING[0] in allowed or any(within(target, f"rlhf_spmd.{name}") for name in allowed):
            return None
        return f"may not import {target} (of ours only: {', '.join(sorted(allowed))})"
    if top in NOT_PACKAGES:
        return f"may not import {target}: nothing in the package does"
    if top in sys.stdlib_module_names:
        if within(module, NO_FILES) and top in OPENERS:
            return f"imports {target}, but {NO_FILES} opens no files"
        return None
    if module == LAZY and not found.late:
        return f"imports {target} at module level; import it where it is used"
    if top in FENCES:
        return None if within(module, FENCES[top]) else f"imports {top}, which only {FENCES[top]} may"
    others = rule(OTHERS, module)
    if others is not None and top not in others:
        return f"may not import {target} (of others only: {', '.join(others) or 'none'})"
    return None


def folder_problems(files: Iterable[Path]) -> list[str]:
    """Returns which folders hold too many files, and which files lie loose in the package. files: relative to the
    root."""
    found, sizes = [], Counter(path.parent.as_posix() for path in files if path.name != "__init__.py")
    for folder, number in sizes.items():
        if number > MAX_FILES and not any(folder == name or folder.startswith(name + "/") for name in LISTS):
            found.append(f"{folder}: {number} files, at most {MAX_FILES}")
    loose = [path.as_posix() for path in files if path.parent.as_posix() == "rlhf_spmd"]
    return found + [f"{path}: lies loose; put it into its room" for path in loose if path not in LOOSE]


def bench_problem(module: str, found: Import) -> str | None:
    """Returns why a bench may not import this of the benches; None if it may. It may import anything else."""
    allowed = rule(BENCH_ROOMS, module)
    if (
        not within(found.module, "bench")
        or found.module == "bench"
        or allowed == ANYTHING
        or any(within(found.module, name) for name in allowed)
    ):
        return None
    return f"may not import {found.module} (of the benches only: {', '.join(allowed) or 'none'})"


def cycle(arrows: dict[str, set[str]]) -> list[str]:
    """Returns modules that import one another in a circle, the first one again at the end; empty if there is no
    circle."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        circle = next((circle for target in sorted(arrows[module]) if (circle := walk(target, [*path, module]))), [])
        done.add(module)
        return circle

    return next((circle for module in sorted(arrows) if (circle := walk(module, []))), [])


def problems_of(root: Path) -> list[str]:
    """Returns everything in a tree that breaks a rule, one line each: path, line, what."""
    arrows, modules, trees = {}, modules_of(root), {}
    found = folder_problems([path.relative_to(root) for path in modules.values()])
    beside = [path for folder in BESIDE for path in sorted((root / folder).rglob("*.py"))]
    for path in [*modules.values(), *beside]:
        where, tree = path.relative_to(root), ast.parse(path.read_text(encoding="utf-8"))
        trees[path], in_package = tree, where.parts[0] in ("rlhf_spmd", "kernels", "strategies")
        nodes = list(ast.walk(tree))
        problems = list(text_problems(nodes, in_package=in_package))
        if in_package:
            problems += word_problems(nodes)
        found += [f"{where}:{node.lineno}: {problem}" for node, problem in problems]
    for module, path in modules.items():
        where, tree = path.relative_to(root), trees[path]
        imports = list(imports_of(tree, module, path.name == "__init__.py", set(modules)))
        for item in imports:
            problem = bench_problem(module, item) if within(module, "bench") else import_problem(module, item)
            found += [f"{where}:{item.line}: {problem}"] if problem else []
        arrows[module] = {item.module for item in imports} & set(modules) - {module}
        for node in ast.walk(tree) if within(module, NO_FILES) else ():
            if isinstance(node, ast.Call) and _name(node.func) in OPENING:
                found.append(f"{where}:{node.lineno}: calls {_name(node.func)}, but {NO_FILES} opens no files")
    if circle := cycle(arrows):
        found.append(f"{modules[circle[0]].relative_to(root)}: a circle of imports: {' -> '.join(circle)}")
    return found
