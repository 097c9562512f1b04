"""A user's algorithm for tests: a page in a file, and functions that load and run it."""

from pathlib import Path

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config
from rlhf_spmd.pages.algorithm import Algorithm, check_functions, load_algorithm
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload
from tests.runs import RunOf, compiled

PAGE = '''"""REINFORCE on the scores as they are: two models, one loss, nothing that changes between iterations."""

from dataclasses import dataclass
from typing import Literal

from rlhf_spmd.algorithms import page
from rlhf_spmd.plan.workflow import Role

TITLE = "REINFORCE"
DATA = {"prompts": "prompt"}
ROLES = {"policy": Role("lm", lr=1e-3, saved=True), "judge": Role("scalar", judge=True)}
METRICS = {
    "return": page.Metric("reward", "return", "{:+8.4f}", headline="points"),
    "surrogate": page.Metric("policy", "loss", "{:+8.4f}"),
}


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    scale: float = 1.0
    sign: Literal["up", "down"] = "up"


def workflow(options, model, compute, prompts):
    policy, judge = model("policy"), model("judge")
    responses, logprobs = policy.generate(prompts)
    scores = judge.infer("scores", prompts, responses)
    weights = compute("token_weights", responses=responses, scores=scores, makes={"weights": "token"})
    policy.train("surrogate", prompts, responses, weights=weights)


def token_weights(scores_B, mask_BG, *, scale, sign):
    weights_B = scale * scores_B * (1 if sign == "up" else -1)
    return mask_BG * weights_B[:, None], {"return": (weights_B.double().sum(), len(weights_B))}


def surrogate(logprobs_BG, weights_BG, mask_BG):
    loss = -(logprobs_BG * weights_BG)[mask_BG].sum()
    return loss, {"surrogate": (loss.detach().double(), mask_BG.sum())}
'''


def write_page(folder: Path, *changes: tuple[str, str], name: str = "mine") -> Path:
    """Returns the page with pieces of its text replaced, as folder/NAME.py."""
    text = PAGE
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path


def checked(path: Path | str, **options) -> Algorithm:
    """Returns a loaded page whose workflow, with these options, and functions fit each other. Raises UserError."""
    algorithm = load_algorithm(str(path))
    chosen = algorithm.options(**options)
    check_functions(algorithm, algorithm.workflow(chosen), chosen)
    return algorithm


def config_of(path: Path, overrides: list[str], *more: str) -> Config:
    """Returns the configuration of tests/folders.write_all for the page above."""
    kept = [word for word in overrides if not word.startswith(("ppo.", "models.", "optimizer."))]
    folders = [word.partition("=")[2] for word in overrides if word.startswith("models.")]
    models = [f"models.{role}={folder}" for role, folder in zip(("policy", "judge"), folders, strict=True)]
    return presets.load("tiny", [*kept, *models, *more], algorithm=str(path))


def everywhere(workload: Workload, cluster: Cluster) -> Placement:
    """Returns a placement of every call on all ranks, for any names of models."""
    layout = Layout.data_parallel(cluster.ranks)
    return Placement({call.name: layout for call in workload.workflow.placed_calls})


def run_of(path: Path, overrides: list[str], *more: str) -> RunOf:
    """Returns a run of the page on one rank."""
    config = config_of(path, overrides, *more)
    return RunOf(config, program=compiled(config, place=everywhere))
