"""What the tests of the program share."""

from collections.abc import Iterator

import pytest

from tests.warm import Warm


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    with Warm() as warm:
        yield warm
