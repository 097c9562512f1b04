"""The docstrings of this repository keep the rules of tests/docstring_rules.py, which find what breaks them."""

import ast

import pytest

from tests.docstring_rules import LEAST_COLUMNS, docstring_problems, main
from tests.import_rules import ROOT


def problems(source: str) -> list[str]:
    return [problem for _, problem in docstring_problems(ast.parse(source))]


def function(docstring: str, head: str = "def ranks_of(self, group):", indent: str = "    ") -> str:
    body = docstring.replace("\n", f"\n{indent}")
    return f'{head}\n{indent}"""{body}"""\n'


@pytest.mark.parametrize("folder", ["rlhf_spmd", "kernels", "strategies", "bench", "tests", "tools"])
def test_the_docstrings_of_this_repository_keep_the_rules(folder, capsys):
    assert main([str(ROOT / folder)]) == 0, capsys.readouterr().out


METHOD = "class Layout:\n" + function("Of one model.", "    def of(self):", " " * 8)
FOUR = "def place(workload, cluster, zero, *, tp):"
LONG = "x" * (LEAST_COLUMNS - 10)


@pytest.mark.parametrize(
    "source",
    [
        function("Returns the ranks of a group."),
        function("The ranks of a group.", "@property\ndef ranks(self):"),
        function("The ranks of a group.", "@functools.cached_property\ndef ranks(self):"),
        function("A group that is empty has no ranks.", "def test_ranks():"),
        function("Makes a layout.\n\nzero: its ZeRO stage.\ntp: its slices.\n", FOUR),
        function("Makes a layout. group: its name."),  # few parameters may be explained within a line
        function("Makes a layout: zero is its ZeRO stage.", FOUR),
        function("group: its name.", "def __init__(self, group):"),
        function("Waits, which is no longer than before, if there is no rank."),
        function("Returns the rank:\n\n    rank = first + 1\n    , and so on\n\nof a group."),
        function(f"Returns {LONG}\n{LONG}"),
        '"""Commands:\n\npython -m one\npython -m two\npython -m three\n"""\n',
        "def _hidden(group):\n    return group\n",
        METHOD.replace("    def", "    @property\n    def"),
    ],
)
def test_good_docstrings_pass(source):
    assert problems(source) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (function("The ranks of a group."), "begin with a verb, not with 'The'"),
        (function("Return the ranks of a group."), "not with 'Return'"),
        (function("`ranks` of a group."), "begin with a verb"),
        (function("The ranks of a group.", "async def ranks_of(self, group):"), "begin with a verb"),
        (function("The ranks of a group.", "@staticmethod\ndef ranks(group):"), "begin with a verb"),
        (function("name: of a group.", "def __init__(self, group):"), "begin with a verb"),
        (METHOD, "of: begin with a verb"),
        (function("Makes a layout. zero: its ZeRO stage. tp: its slices.", FOUR), "explain zero on a line"),
        (function("Makes a layout.\n\nzero: its ZeRO stage; tp: its slices.", FOUR), "explain tp on a line"),
        (function("Makes one. *more: its ranks.", "def place(one, two, three, *more):"), "explain more on a line"),
        (
            'class A:\n    """Sizes. b: one."""\n\n    a: int\n    b: int\n    c: int\n    d: int\n',
            "explain b on a line",
        ),
        (function("Raises UserError for what is no rank."), "say 'is not a', not 'is no'"),
        (
            '"""Names that are\nno ranks, but for this long line that goes on up to the limit of columns."""',
            "not 'are no'",
        ),
        ('class A:\n    """A thing that is no rank."""\n', "not 'is no'"),
        (function(f"Returns {LONG} data-\nparallel ranks."), "a word is torn"),
        (function(f"Returns {LONG} `python\n-m rlhf_spmd`."), "code in backticks is torn"),
        (function(f"Returns {LONG}\n, and the last one."), "a line begins with a closing sign"),
        (function(f"Returns the ranks\nof a group, {LONG} {LONG}."), "a line is short"),
        (f'"""Texts: small\nfiles that are {LONG}\n{LONG}."""\n', "a line is short"),
    ],
)
def test_bad_docstrings_are_found(source, words):
    found = problems(source)
    assert any(words in problem for problem in found), found


def test_the_command_names_files_and_lines(tmp_path, capsys):
    (tmp_path / "good.py").write_text(function("Returns the ranks."), encoding="utf-8")
    assert main([str(tmp_path)]) == 0 and "1 files: no problems" in capsys.readouterr().out
    (tmp_path / "bad.py").write_text("\n\n" + function("The ranks."), encoding="utf-8")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'bad.py'}:4: ranks_of: begin with a verb")
