"""Fixtures for tests of files on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.tiers.disk import files as disk_files


@pytest.fixture(params=["queue", "threads"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the kernel's queue, and as if that were not available."""
    if request.param == "threads":
        monkeypatch.setattr(disk_files, "_with_queue", lambda path, threads: threads)
    return str(request.param)


@pytest.fixture
def only_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use threads only: for tests that make os.preadv and os.pwritev fail."""
    monkeypatch.setattr(disk_files, "_with_queue", lambda path, threads: threads)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"
