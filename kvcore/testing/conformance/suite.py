"""The kit as a pytest class: an adapter's own tests subclass it.

class TestMyEngine(ConformanceSuite):
    def make_driver(self) -> Driver:
        return MyDriver()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvcore.testing.conformance.driver import Driver
from kvcore.testing.conformance.kit import CASES, Case, Kit

__all__ = ["ConformanceSuite"]


class ConformanceSuite:
    """Every case a test. A case that needs what the engine lacks is skipped, and says so."""

    def make_driver(self) -> Driver:
        """The driver to test; override it."""
        raise NotImplementedError("a subclass of ConformanceSuite gives its driver")

    def make_partners(self) -> Sequence[Driver]:
        """Drivers of the engines that must read what it writes, and the other way round."""
        return ()

    def make_store(self) -> str | None:
        """The URL of a remote store that all of them reach."""
        return None

    @pytest.fixture(scope="class")
    def kit(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Kit]:
        suite: ConformanceSuite = request.cls()
        folder = tmp_path_factory.mktemp("conformance")
        with Kit(
            suite.make_driver(), folder, partners=suite.make_partners(), store=suite.make_store()
        ) as kit:
            yield kit

    @pytest.mark.parametrize("one", CASES, ids=lambda one: f"{one.section}-{one.name}")
    def test_case(self, kit: Kit, one: Case) -> None:
        if lacking := one.lacks(kit):
            pytest.skip(lacking)
        one.run(kit)
