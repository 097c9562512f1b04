"""Parameters of functions, read from source: as `inspect` reads them from what is imported, or a reason why not."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from rlhf_spmd.pages.algorithm import FUNCTIONS, algorithm_names, load_algorithm
from rlhf_spmd.pages.function_sources import Unread, read_module, read_source
from rlhf_spmd.pages.functions import COMPANIONS, parameters_of
from rlhf_spmd.pages.user_module import import_file

SIGNATURES = """
import functools
from functools import lru_cache as remembered

import torch


def plain(a, b=1, *, c, d=None): ...
def places(a, /, b): ...
def rest(a, *others, b, **more): ...
async def waits(responses): return [0.0]
def gives(responses):
    yield 1.0
def inner(responses):
    def other():
        yield 1.0
    return list(other())
@functools.cache
def kept(a, b): ...
@remembered(maxsize=3)
def also_kept(a, b): ...
@torch.no_grad()
def silent(a, b_BG): ...
short = lambda a, b=2: a
alias = plain
try:
    import json
except ImportError:
    json = None
class Thing: ...
number = 3
"""
READ = ("plain", "places", "rest", "waits", "gives", "inner", "kept", "also_kept", "silent", "short", "alias")


def signature(function: object) -> list[tuple]:
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default is one.empty) for one in found]


def test_functions_of_shipped_pages_have_the_same_parameters_by_both_readers():
    """So `check` and the start of a run compare the same things."""
    compared = 0
    for place in FUNCTIONS:
        module = importlib.import_module(f"rlhf_spmd.algorithms.{place}")
        source = read_module(module.__name__, Path())
        for name in source.functions:
            assert parameters_of(source.function(name)) == parameters_of(getattr(module, name)), (place, name)
    for name in algorithm_names():
        algorithm = load_algorithm(name)
        for call in algorithm.workflow(algorithm.options()).calls:
            if function := getattr(call, "arguments", None) and call.function:
                loaded = algorithm.function(function, call.module)
                read = algorithm.function(function, call.module, from_source=True)
                assert read.words == loaded.words
                for part in ("function", *(suffix.removeprefix("_") for suffix in COMPANIONS)):
                    one, other = getattr(read, part), getattr(loaded, part)
                    assert (one is None) == (other is None), (name, function, part)
                    assert one is None or parameters_of(one) == parameters_of(other)
                    compared += one is not None
    assert compared > 20


def test_every_form_of_parameters_is_read_as_python_does(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SIGNATURES, encoding="utf-8")
    module, source = import_file(path, "_read_and_imported"), read_source(path)
    for name in READ:
        read, loaded = source.function(name), getattr(module, name)
        assert signature(read) == signature(loaded) and read.__name__ in (name, "plain")
        assert inspect.isgeneratorfunction(read) == inspect.isgeneratorfunction(loaded)
    assert inspect.isclass(source.function("Thing")) and source.function("number") == 3
    assert source.function("none") is None and source.missing_modules() == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def wrap(f): return f\n@wrap\ndef mine(a): ...", "has the decorator @wrap"),
        ("def make(a): return lambda b: a\nmine = make(3)", "m.py makes mine by make(3)"),
        ("try:\n    def mine(a): ...\nexcept ValueError:\n    def mine(b): ...", "binds mine in several places"),
        ("if True:\n    pass\nglobals()['mine'] = print", "m.py may make mine when it is imported"),
        ("from os.path import *", "m.py may make mine when it is imported"),
        ("from absent.deeper import mine", "there is no source of the module absent.deeper here"),
        ("from helper import absent as mine", "helper, whose source does not bind it"),
        ("from broken import mine", "broken, which cannot be read"),
        ("from . import mine", "relative import"),
        ("from m import other as mine\nother = mine", "in a circle"),
        ("mine, other = print, 3", "m.py makes mine when it runs"),
        ("from math import sqrt as mine", "there is no source of the module math here"),
    ],
)
def test_what_cannot_be_read_says_why(text, why, tmp_path):
    (tmp_path / "m.py").write_text(text, encoding="utf-8")
    (tmp_path / "helper.py").write_text("def there(a): ...\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("def there(a: ...\n", encoding="utf-8")
    with pytest.raises(Unread, match=".") as told:
        read_source(tmp_path / "m.py").function("mine")
    assert why in str(told.value)


def test_imports_are_followed_without_importing(tmp_path):
    for part in ("pack", "pack/inner"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "__init__.py").write_text("raise AssertionError('imported')\n", encoding="utf-8")
    (tmp_path / "pack" / "inner" / "__init__.py").write_text("from ..deep import given as score\n", encoding="utf-8")
    (tmp_path / "pack" / "deep.py").write_text("from .deepest import *\ndef given(a, *, b): ...\n", encoding="utf-8")
    (tmp_path / "m.py").write_text(
        "import absent_package, torch\nfrom pack.inner import score as mine\n", encoding="utf-8"
    )
    source = read_source(tmp_path / "m.py")
    assert [one.name for one in parameters_of(source.function("mine"))] == ["a", "b"]
    assert source.missing_modules() == ["absent_package"] and "pack" not in sys.modules
