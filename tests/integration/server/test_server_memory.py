"""The server's host memory is on huge pages where the mount of its folder has them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcore.memory.hugepages import HUGE_PAGE

IN_A_MOUNT = """
import json, logging, mmap, os, sys
from contextlib import closing
from pathlib import Path
from kvcore.errors import TierUnavailable
from kvcore.server.runtime_dir import RuntimeDir, open_arena
from kvcore.memory.hugepages import SharedPages
from kvcore_devtools.memory_pages import huge_nbytes

said = []
logging.getLogger("kvcore.server").addHandler(type("", (logging.Handler,), {
    "emit": lambda self, record: said.append(record.getMessage())})())
mount, nbytes, wanted = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "wanted"
folder = RuntimeDir(mount / "kvcore")
os.close(folder.make_arena("arena-1", nbytes, huge_pages=wanted))
taken = os.stat(folder.path / "arena-1").st_blocks * 512
file = open_arena(folder.path, "arena-1")
with closing(SharedPages(file, nbytes)) as pages:
    zero = not any(pages.view)
    pages.view[-4:] = b"last"
    found = {"huge": pages.huge, "huge_nbytes": huge_nbytes(pages.view)}
with closing(SharedPages(file, nbytes, huge=False)) as pages:
    found["kept"] = bytes(pages.view[-4:]).decode()
try:
    folder.make_arena("arena-2", 16 * nbytes, huge_pages=wanted)
except TierUnavailable as error:
    found["refused"] = str(error)
left = sorted(path.name for path in folder.path.glob("arena-*"))
print(json.dumps(found | {"zero": zero, "taken": taken, "said": said, "left": left}))
"""
NBYTES = 4 * HUGE_PAGE


def in_a_mount(folder: Path, huge: str, *, wanted: bool = True) -> dict[str, Any]:
    """What the server finds on a tmpfs of 32 MiB that is mounted for it alone."""
    private = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    mount = f'mount -t tmpfs -o size=32m,huge={huge} none "$1" && shift && exec "$@"'
    probe = [*private, "sh", "-c", mount, "sh", str(folder), "true"]
    if (ended := subprocess.run(probe, check=False, capture_output=True, text=True)).returncode:
        pytest.skip(f"this machine lets nobody mount memory: {ended.stderr}")
    command = [sys.executable, "-c", IN_A_MOUNT, str(folder), str(NBYTES)]
    ran = subprocess.run(
        [*private, "sh", "-c", mount, "sh", str(folder), *command, "wanted" if wanted else "no"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not ran.returncode, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("huge", ["advise", "always"])
def test_memory_is_on_huge_pages_where_the_mount_has_them(tmp_path: Path, huge: str) -> None:
    with contextlib.suppress(OSError):  # a suite that ran before has fragmented the memory
        Path("/proc/sys/vm/compact_memory").write_text("1")
    found = in_a_mount(tmp_path, huge)
    assert found["huge"]
    assert found["huge_nbytes"], "none: all, where memory is not fragmented"
    assert not found["said"]
    assert found["zero"]
    assert found["kept"] == "last"
    assert found["taken"] >= NBYTES, "its memory is there before anybody touches it"


@pytest.mark.parametrize(("huge", "wanted"), [("never", True), ("advise", False)])
def test_else_it_is_taken_in_small_ones(tmp_path: Path, huge: str, wanted: bool) -> None:
    found = in_a_mount(tmp_path, huge, wanted=wanted)
    assert found["huge_nbytes"] == 0
    assert found["taken"] >= NBYTES
    assert found["zero"]
    if wanted:
        assert f"mount -o remount,huge=advise {tmp_path}" in found["said"][0]
    else:
        assert not found["said"]


@pytest.mark.parametrize("huge", ["never", "advise"])
def test_more_than_there_is_is_refused_and_leaves_nothing(tmp_path: Path, huge: str) -> None:
    found = in_a_mount(tmp_path, huge)
    assert "lower host.capacity, or give server.folder on a larger tmpfs" in found["refused"]
    assert found["left"] == ["arena-1"]
