"""Tests read nothing of the machine that they did not make."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.config import load_config
from kvcore.config.paths import folder_of, memory_of

ROOT = Path(__file__).parents[3]

INNER = """
import os
from kvcore.config import load_config
from kvcore.config.paths import folder_of
from kvcore.harness.models import model_cache

def test_inner():
    config = load_config()
    assert config.host.capacity != 7 << 20
    assert config.log.level == "debug"
    assert str(folder_of(config.server)) != "/run/theirs"
    os.makedirs(model_cache(), exist_ok=True)
"""


def test_a_server_and_its_notes_are_where_this_run_has_them() -> None:
    server = load_config().server
    for place in (folder_of(server), memory_of(server)):
        [own] = [path for path in place.parents if path.name.startswith("kvcore-tests-")]
        assert stat.S_IMODE(os.stat(own).st_mode) == 0o700


@pytest.mark.slow
def test_settings_of_the_user_reach_no_test_but_those_that_show_what_it_does(
    tmp_path: Path,
) -> None:
    """And a home that cannot be written is not needed."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_inner.py").write_text(INNER)
    theirs = {
        "KVCORE_CONFIG": str(tmp_path / "none.toml"),
        "KVCORE__HOST__CAPACITY": "7MiB",
        "KVCORE__SERVER__FOLDER": "/run/theirs",
        "KVCORE__LOG__LEVEL": "debug",
        "HOME": "/proc/none",
        "XDG_CACHE_HOME": "/proc/none/cache",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **theirs},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
