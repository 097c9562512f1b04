"""What a user reads is plain English: options are full phrases, helps begin with a verb and have an example, and
messages use the words of docs/glossary.md."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from rlhf_spmd.command_line.arguments import VERBS, parse, parser
from rlhf_spmd.config import options as configs
from rlhf_spmd.pages.algorithm import algorithm_names, load_algorithm
from rlhf_spmd.pages.option_tree import options_of
from rlhf_spmd.pages.strategy import strategy_names
from rlhf_spmd.runtime.offline.options import GenerateOptions
from tools.pages import options_page

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "rlhf_spmd").rglob("*.py"))
NOT_PLAIN = re.compile(  # "there is no ..." and "is no longer" are English
    r"(?<!\b[Tt]here )\b(?:is|are) no\b(?! longer)|\bbehind\b|words of the command line|KEY=VALUE words|by place only"
)
LEAST_WORDS = 4
# the beginning of a phrase that lacks its noun
DANGLING = re.compile(r"(of|as|for|in|to|that|those|them|it|its|most|with)\b", re.IGNORECASE)
DOES = ("Train", "Generate", "Print", "Search", "Forecast", "Draw", "Compute", "Evaluate", "Measure", "Show", "Write")
DOES += ("List", "Run", "Turn")


def user_texts(source: str) -> list[str]:
    """Returns the texts in a module, a blank for each value in them, without its docstrings."""
    tree = ast.parse(source)
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = {id(node.body[0].value) for node in documented if node.body and isinstance(node.body[0], ast.Expr)}
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in joined for part in node.values}
    found = [
        "".join(getattr(part, "value", "") if isinstance(part, ast.Constant) else " " for part in node.values)
        for node in joined
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | inside:
            found.append(node.value)
    return found


def options() -> dict[str, tuple[object, str]]:
    """Returns default and meaning of every option of the package."""
    trees = [configs.Config(preset="", algorithm=load_algorithm(name)) for name in algorithm_names()]
    found = {
        key: ("" if one.form else one.value, one.meaning) for tree in trees for key, one in options_of(tree).items()
    }
    found |= {f"generate {key}": (one.value, one.meaning) for key, one in options_of(GenerateOptions()).items()}
    for name in strategy_names():
        found |= {f"{name} {key}": (default, text) for key, _, default, text in options_page.strategy_options(name)}
    del found["preset"]  # set by --preset only
    return found


OPTIONS = options()


def test_messages_are_plain():
    found = [(path, text) for path in FILES for text in user_texts(path.read_text(encoding="utf-8"))]
    assert [
        f"{path.relative_to(ROOT)}: {text}" for path, text in found if NOT_PLAIN.search(" ".join(text.split()))
    ] == []


def test_options_are_full_phrases():
    assert len(OPTIONS) > 150
    short = [f"{key}: {text}" for key, (_, text) in OPTIONS.items() if len(text.split()) < LEAST_WORDS]
    assert short == []
    assert [f"{key}: {text}" for key, (_, text) in OPTIONS.items() if DANGLING.match(text)] == []


@pytest.mark.parametrize("name", VERBS)
def test_a_help_begins_with_a_sentence_and_has_an_example(name, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args([name, "--help"])
    usage, does, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: rlhf-spmd {name}") and does.split()[0] in DOES and does.endswith(".")
    examples = [shlex.split(line.partition(" > ")[0]) for line in VERBS[name]["examples"]]
    parsed = [parse(words[words.index("rlhf-spmd") + 1 :]) for words in examples if "rlhf-spmd" in words]
    assert name in {one.verb for one in parsed}
