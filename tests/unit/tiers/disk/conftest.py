"""What tests of files on disk stand on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.tiers.disk import files as disk_files


@pytest.fixture(params=["queue", "threads"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's queue, and as where it cannot be had."""
    if request.param == "threads":
        monkeypatch.setattr(disk_files, "_with_queue", lambda path, threads: threads)
    return str(request.param)


@pytest.fixture
def only_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that make os.preadv and os.pwritev fail."""
    monkeypatch.setattr(disk_files, "_with_queue", lambda path, threads: threads)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"
