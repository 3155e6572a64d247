"""The packages that decide, each with the tests that are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PACKAGES", "Package"]


@dataclass(frozen=True)
class Package:
    """Sources, as paths or patterns below the root, and the tests that ought to notice changes.

    The tests are folders or files. ``marks`` choose among the tests. Modules with ``last`` in their
    names take long, and run after the others.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    marks: str = "not engine and not exhaustive and not slow"
    last: str = "machine"

    def files(self, root: Path) -> list[str]:
        """Return the sources' files, relative to ``root``."""
        found = {path for pattern in self.sources for path in root.glob(pattern)}
        return sorted(str(path.relative_to(root)) for path in found if path.name != "__init__.py")

    def modules(self, root: Path) -> list[str]:
        """Return the modules with the package's tests, relative to ``root``, in their order."""
        folders = {path for test in self.tests for path in (root / test).rglob("test_*.py")}
        files = {root / test for test in self.tests if test.endswith(".py")}
        names = sorted(str(path.relative_to(root)) for path in folders | files)
        return sorted(names, key=lambda name: self.last in name)


PACKAGES: Mapping[str, Package] = {
    "index": Package(("kvcore/index/*.py",), ("tests/unit/index",)),
    "transfer": Package(("kvcore/transfer/*.py",), ("tests/unit/transfer",)),
    "connector": Package(("kvcore/connector/*.py",), ("tests/unit/connector", "tests/adapters")),
    "manager": Package(
        ("kvcore/manager/*.py",),
        ("tests/unit/manager", "tests/unit/tiers/test_remote_lookup.py"),
    ),
    "disk": Package(("kvcore/tiers/disk/*.py", "kvcore/tiers/guard.py"), ("tests/unit/tiers",)),
    "keys": Package(("kvcore/model/*.py",), ("tests/unit/model",)),
    "remote": Package(
        tuple(
            f"kvcore/tiers/remote/{name}.py"
            for name in ("lookup", "tier", "format", "shard_registry", "pending_deletes")
        ),
        ("tests/unit/tiers",),
    ),
    "fusion": Package(
        tuple(
            f"kvcore/fusion/{name}.py"
            for name in (
                *("select", "segments", "_segment_file", "controller", "find"),
                *("gate", "placed", "plan", "_chains", "_anchors"),
            )
        ),
        ("tests/unit/fusion",),
    ),
    "server": Package(
        ("kvcore/server/model_cache.py", "kvcore/server/session.py"),
        ("tests/unit/server", "tests/integration/server"),
        marks="not engine and not exhaustive",
    ),
    "vllm": Package(
        (
            "adapters/vllm/kvcore_vllm/leader.py",
            "adapters/vllm/kvcore_vllm/saves.py",
            "adapters/vllm/kvcore_vllm/worker_guard.py",
        ),
        ("tests/adapters/vllm",),
    ),
    "sglang": Package(
        ("adapters/sglang/kvcore_sglang/leader.py", "adapters/sglang/kvcore_sglang/worker.py"),
        ("tests/adapters/sglang",),
    ),
    "trtllm": Package(
        (
            "adapters/trtllm/kvcore_trtllm/leader.py",
            "adapters/trtllm/kvcore_trtllm/staging.py",
            "adapters/trtllm/kvcore_trtllm/worker.py",
        ),
        ("tests/adapters/trtllm",),
    ),
}
