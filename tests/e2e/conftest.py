"""What the tests of the program share."""

import pytest

from tests.warm import Warm, shared


@pytest.fixture(scope="session")
def warm() -> Warm:
    return shared()
