"""What stays, whatever gets smaller, has the tests that tests/keeps.toml names."""

import re
import tomllib

import pytest

from tests.size_rules import REPOSITORY

KEEPS = tomllib.loads((REPOSITORY / "tests" / "keeps.toml").read_text(encoding="utf-8"))
TESTS = sorted({test for lines in KEEPS.values() for tests in lines.values() for test in tests})


@pytest.mark.parametrize("test", TESTS)
def test_it_is_there(test):
    name, _, function = test.partition("::")
    path = REPOSITORY / name
    assert path.is_dir() or re.search(f"^def {function or 'test_'}", path.read_text(encoding="utf-8"), re.MULTILINE)
