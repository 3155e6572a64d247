"""Settings for every test."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Two busy cores: a slow example is the machine's doing, and a flaky deadline tells nothing.
settings.register_profile("kvcore", deadline=None, print_blob=True)
settings.load_profile("kvcore")


@pytest.fixture(autouse=True)
def kvcore_logs_as_before() -> Iterator[None]:
    """A test that configures kvcore's logging leaves the others' alone."""
    root = logging.getLogger("kvcore")
    before = root.level, root.propagate, list(root.handlers)
    root.setLevel(logging.NOTSET)
    root.propagate = True
    yield
    root.handlers[:] = before[2]
    root.setLevel(before[0])
    root.propagate = before[1]
