"""The rule for test files: tests/unit mirrors the rooms, and every module has the test file of its name, or a line in
COVERS that names the file that tests it.

`coverage_problems` reads a tree and names what breaks it; tests/unit/house/test_import_rules.py asks it about this
repository.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.import_rules import LAZY, imports_of, modules_of

BESIDE_ROOMS = ("bench", "house")  # folders of tests/unit that test no room of the package
ALONE, WITH_RANKS = "unit", ("mpi", "e2e")  # folders of tests: one for each room, and those that start ranks
NAMED_BY_WORD = ("rlhf_spmd.algorithms", "rlhf_spmd.strategies")  # a test names these pages as a user does
VERBS, PROGRAM = "rlhf_spmd.verbs", "rlhf_spmd"  # a test that runs the program names its verbs
# test file -> modules without a test file of their own, which it imports or runs, be it by way of other modules
COVERS: dict[str, tuple[str, ...]] = {
    "e2e/test_ahead.py": ("runtime.checkpoint.in_flight",),
    "e2e/test_rehearse.py": ("runtime.rehearse.rehearsal",),
    "unit/algorithms/test_controllers.py": ("algorithms.ppo",),
    "unit/algorithms/test_off_policy.py": ("algorithms.importance",),
    "unit/algorithms/test_slow_supervised.py": ("algorithms.dpo", "algorithms.reward_model", "algorithms.sft"),
    "unit/algorithms/test_slow_twin.py": (
        *("runtime.execute.handlers.generate", "runtime.execute.handlers.infer"),
        *("runtime.execute.page_functions", "runtime.execute.optimizer_step", "runtime.execute.passes"),
    ),
    "e2e/test_policy_gradient_pages.py": (
        *("algorithms.grpo", "algorithms.policy_gradient", "algorithms.reinforce_plus_plus", "algorithms.remax"),
        "algorithms.rloo",
    ),
    "e2e/test_stages.py": ("algorithms.distill",),
    "unit/pages/test_algorithm.py": ("algorithms.page", "pages.functions", "plan.workflow"),
    "unit/pages/test_option_suggestions.py": ("pages.other_names",),
    "unit/migration/test_translate.py": ("migration.rules", "migration.sources", "verbs.coming_from"),
    "unit/migration/test_commands.py": ("migration.sources",),
    "e2e/test_evaluations.py": ("verbs.evaluate",),
    "e2e/test_odd_surroundings.py": ("verbs.algorithms",),
    "unit/command_line/test_fitting_strategies.py": ("command_line.checks",),
    "unit/config/test_file.py": ("command_line.words",),
    "unit/config/test_options.py": ("pages.option_tree",),
    "unit/verbs/test_check.py": ("__main__", "verbs.convert"),
    "unit/verbs/test_plan.py": ("command_line.arguments", "machines.cluster_file"),
    "unit/verbs/test_draw.py": ("runtime.pictures.placement_map",),
    "unit/verbs/test_report.py": ("runtime.records.run_files", "runtime.records.web_page"),
    "e2e/test_failures.py": ("runtime.failure.postmortem", "verbs.postmortem", "verbs.status"),
    "unit/runtime/profile/test_profile.py": ("runtime.profile.hardware",),
    "unit/runtime/profile/test_products.py": ("files.user_cache",),
    "unit/plan/test_layout.py": ("plan.cluster",),
    "unit/plan/cost/test_seconds.py": ("plan.cost.forecast",),
    "unit/plan/program/test_compile.py": ("plan.program.instructions", "plan.program.transfers"),
    "unit/plan/program/test_reallocate.py": ("plan.program.buckets", "plan.workload"),
    "unit/plan/program/test_tensors.py": ("plan.shard",),
    "unit/plan/proof/test_check.py": ("plan.proof.memory_check",),
    "unit/plan/search/test_exact.py": ("plan.search.budget", "plan.search.candidates"),
    "unit/plan/search/test_planner.py": ("plan.search.priors",),
    "unit/model/test_hf.py": ("model.weights",),
    "unit/runtime/data/test_row_tokens.py": ("runtime.data.messages", "runtime.data.template_arguments"),
    "unit/runtime/run/test_precompute.py": ("runtime.data.precomputed", "runtime.run.prepare"),
    "mpi/test_train_engine.py": (
        *("runtime.engines.deepspeed_engine", "runtime.engines.deepspeed_state", "runtime.engines.flat_engine"),
    ),
    "unit/runtime/execute/test_executor.py": ("runtime.execute.instruction_loop",),
    "unit/runtime/execute/test_iteration.py": ("runtime.execute.response_hashes",),
    "unit/runtime/execute/handlers/test_compute.py": ("runtime.execute.job", "runtime.world.metric_sums"),
    "unit/runtime/execute/test_invariants.py": ("runtime.run.inputs", "runtime.run.loop"),
    "unit/runtime/rewards/test_function.py": ("pages.named_objects",),
    "unit/runtime/environments/test_adapters.py": ("runtime.environments.native", "runtime.environments.others"),
    "unit/runtime/environments/test_episodes.py": ("runtime.environments.rows",),
    "unit/runtime/environments/test_workers.py": ("runtime.workers.pool", "runtime.workers.serve"),
    "unit/runtime/generation/test_engine.py": (
        *("runtime.generation.decoder", "runtime.generation.kv_cache", "runtime.generation.requests"),
    ),
    "unit/runtime/generation/test_random_streams.py": ("runtime.run.samples",),
    "unit/runtime/failure/test_failures.py": ("errors",),
    "e2e/test_supervise.py": ("runtime.failure.processes",),
    "unit/runtime/pictures/test_timeline.py": ("runtime.pictures.picture",),
    "e2e/test_train.py": ("runtime.run.rollouts", "runtime.run.run_text"),
    "mpi/test_world.py": ("runtime.world.control_messages",),
    "unit/kernels/test_cpu.py": ("kernels.sample_cpu",),
    "unit/kernels/test_token_logprobs.py": ("kernels.softmax_chunk",),
    "unit/kernels/test_support.py": ("kernels.support_ids", "kernels.support_threshold"),
    "unit/bench/test_static_kernels.py": ("kernels.triton_import",),
    "mpi/test_sample_shard.py": ("kernels.collectives",),
    "unit/pages/test_strategy.py": ("strategies._template", "strategies.flattening"),
    "unit/strategies/test_strategies.py": (
        *("strategies.heterogeneous", "strategies.interleaving1", "strategies.interleaving2"),
        *("strategies.reallocation", "strategies.separation", "strategies._separation"),
    ),
}


@dataclass(frozen=True)
class Named:
    """What a file of tests names: modules that it imports, and its texts but docstrings."""

    modules: frozenset[str]
    texts: frozenset[str]


def coverage_problems(root: Path, covers: dict[str, tuple[str, ...]] = COVERS) -> Iterator[str]:
    """Yields everything in a tree that breaks the rule, one line each."""
    tree = _Tree(root)
    told = {f"rlhf_spmd.{short}": test for test, shorts in covers.items() for short in shorts}
    for module in sorted(set(told) - tree.modules.keys()):
        yield f"COVERS names {module}, which is not a module"
    for module, path in tree.modules.items():
        where = path.relative_to(root).as_posix()
        alone, *others = _test_files(module)
        own = [test for test in others if test in tree.tests and module in tree.used(test)]
        own += [alone] if alone in tree.tests and module in tree.reached(alone) else []
        if own and module in told:
            yield f"{where}: has the test file {own[0]}; delete its line in COVERS"
        elif module in told and told[module] not in tree.tests:
            yield f"{where}: tests/{told[module]} of COVERS does not exist"
        elif module in told and module not in tree.reached(told[module]):
            yield f"{where}: tests/{told[module]} of COVERS neither imports nor runs it"
        elif not own and module not in told:
            yield f"{where}: has no test file tests/{alone} that imports or runs it, and no line in COVERS"
    rooms = {module.removeprefix("rlhf_spmd").lstrip(".").replace(".", "/") for module in tree.rooms} | {*BESIDE_ROOMS}
    for test in tree.tests:
        room = test.removeprefix(ALONE).rpartition("/")[0].lstrip("/")
        if test.startswith(f"{ALONE}/") and "/test_" in test and room not in rooms:
            yield f"tests/{test}: there is no room {room}"


def _test_files(module: str) -> tuple[str, ...]:
    """Returns where the test file of a module may be, below tests/."""
    *room, name = module.split(".")[1:]
    return "/".join((ALONE, *room, f"test_{name}.py")), *(f"{folder}/test_{name}.py" for folder in WITH_RANKS)


class _Tree:
    """The modules of the package and the files of tests in a tree, and what they import.

    modules: without packages, which are the rooms; tests: paths below tests/
    """

    def __init__(self, root: Path):
        every = modules_of(root)
        self.modules = {
            module: path
            for module, path in every.items()
            if module.startswith("rlhf_spmd") and path.name != "__init__.py"
        }
        self.rooms = every.keys() - self.modules.keys()
        paths = {path.relative_to(root / "tests").as_posix(): path for path in sorted((root / "tests").rglob("*.py"))}
        dotted = {f"tests.{test.removesuffix('.py').replace('/', '.')}": test for test in paths}
        known = {*every, *dotted}
        self.arrows = {
            module: _named(path, module, known).modules & self.modules.keys() for module, path in self.modules.items()
        }
        self.arrows[LAZY] = {module for module in self.arrows.get(LAZY, ()) if not module.startswith(f"{VERBS}.")}
        self.tests = {dotted[module]: _named(paths[dotted[module]], module, known) for module in dotted}
        self.helpers = {
            test: {dotted[module] for module in named.modules if module in dotted} for test, named in self.tests.items()
        }

    @functools.cache  # noqa: B019
    def used(self, test: str) -> frozenset[str]:
        """Returns the modules that a test file and the files of tests that it imports import or name."""
        files, todo = set(), [test]
        while todo:
            if (file := todo.pop()) not in files:
                files.add(file)
                todo += self.helpers[file]
        modules = {module for file in files for module in self.tests[file].modules}
        texts = {text for file in files for text in self.tests[file].texts}
        words = {word for text in self.tests[test].texts for word in re.findall(r"\w+", text)}
        modules |= {f"{package}.{word}" for package in NAMED_BY_WORD for word in words}
        modules |= {
            name for text in texts for name in re.findall(r"rlhf_spmd(?:\.\w+)+", text)
        }  # run as another process
        if LAZY in modules or PROGRAM in texts:
            modules |= {LAZY, *(f"{VERBS}.{text.replace('-', '_')}" for text in texts)}
        return frozenset(modules & self.modules.keys())

    def reached(self, test: str) -> set[str]:
        """Returns these, and all that they import in turn; the program imports every verb, of which only those named
        count."""
        reached: set[str] = set()
        todo = list(self.used(test))
        while todo:
            if (module := todo.pop()) not in reached:
                reached.add(module)
                todo += self.arrows.get(module, ())
        return reached


def _named(path: Path, module: str, known: set[str]) -> Named:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = list(ast.walk(tree))
    docstrings = {id(node.body[0].value) for node in nodes if isinstance(node, documented) and _doc(node)}
    texts = (
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    )
    imports = imports_of(tree, module, path.name == "__init__.py", known)
    return Named(frozenset(item.module for item in imports), frozenset(texts))


def _doc(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str | None:
    return ast.get_docstring(node, clean=False)
