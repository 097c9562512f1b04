"""The embedded task with tools is what its documents claim."""

import pytest

from rlhf_spmd.embedded.table_tools import Table


def test_the_tools_answer():
    environment = Table()
    environment.reset({"amo": 12})
    assert environment.lookup("amo") == "12" and environment.lookup("tiv") == "unknown"
    assert [environment.calculate(one) for one in ("12*13", "5-7", "-2+3")] == ["156", "-2", "1"]
    with pytest.raises(ValueError, match="write two numbers"):
        environment.calculate("__import__('os')")
