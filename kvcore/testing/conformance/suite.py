"""The conformance kit as a pytest class, for an adapter's tests to subclass.

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
    """Every case as a test. A case that needs a capability the engine lacks is skipped."""

    def make_driver(self) -> Driver:
        """Return the driver to test. Must be overridden."""
        raise NotImplementedError("a subclass of ConformanceSuite must define make_driver")

    def make_partners(self) -> Sequence[Driver]:
        """Return drivers of the engines that exchange KV with it, in both directions."""
        return ()

    def make_store(self) -> str | None:
        """Return the URL of a remote store that all engines reach, or None."""
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
