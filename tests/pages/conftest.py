"""One browser for the tests of a module."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pages.browser import started


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as running:
        yield running
