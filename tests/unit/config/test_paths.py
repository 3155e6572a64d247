"""The default folder of a server, where a user has one or another."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.config import paths
from kvcore.config.paths import folder_of, memory_of
from kvcore.config.schema_server import ServerConfig

UID = 4711
DEFAULT = ServerConfig()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for /run and /dev/shm; the user is not root, and owns what it makes."""
    for name in ("run", "shm"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(paths, "RUN", tmp_path / "run")
    monkeypatch.setattr(paths, "MEMORY", tmp_path / "shm")
    monkeypatch.setattr(paths, "current_user", lambda: UID)
    return tmp_path


def test_a_configured_folder_holds_all(root: Path) -> None:
    config = ServerConfig(folder=root / "kv")
    assert (folder_of(config), memory_of(config)) == (root / "kv", root / "kv")


def test_without_a_place_of_its_own_a_user_has_one_in_shared_memory(root: Path) -> None:
    place = root / "shm" / f"kvcore-{UID}"
    assert (folder_of(DEFAULT), memory_of(DEFAULT)) == (place, place)


def test_a_user_who_is_logged_in_has_a_place_of_its_own(root: Path) -> None:
    (root / "run" / "user" / str(UID)).mkdir(parents=True, mode=0o700)
    assert folder_of(DEFAULT) == root / "run" / "user" / str(UID) / "kvcore"
    assert memory_of(DEFAULT) == root / "shm"


def test_a_service_has_its_runtime_directory(root: Path) -> None:
    (root / "run" / "user" / str(UID)).mkdir(parents=True, mode=0o700)
    (root / "run" / "kvcore").mkdir(mode=0o700)
    assert folder_of(DEFAULT) == root / "run" / "kvcore"
    (root / "run" / "kvcore").chmod(0o755)
    assert folder_of(DEFAULT) == root / "run" / "user" / str(UID) / "kvcore", "others may enter it"


def test_a_client_finds_the_server_that_began_in_another_session(root: Path) -> None:
    """It was started by a service manager, before its user logged in."""
    began = folder_of(DEFAULT)
    began.mkdir(mode=0o700)
    (began / "server.lock").touch()
    (root / "run" / "user" / str(UID)).mkdir(parents=True, mode=0o700)
    assert folder_of(DEFAULT) == began
    began.chmod(0o777)
    assert folder_of(DEFAULT) != began, "somebody else may have made that lock"
