"""A real server under the rights that the chart's pod has: user, capabilities, file systems."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcore_devtools.servers import free_port, lacking
from support.chart import rendered
from support.deployment import ROOT

pytestmark = [pytest.mark.remote, pytest.mark.slow]

DEADLINE_S = 60.0


def server_pod() -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the pod's specification, its container, and the settings that are mounted."""
    found = rendered({"store": {"kind": "none"}})
    [pod] = [r["spec"]["template"]["spec"] for r in found if r["kind"] == "DaemonSet"]
    [told] = [r["data"] for r in found if r["kind"] == "ConfigMap" and "server.toml" in r["data"]]
    return pod, pod["containers"][0], told["server.toml"]


def blocked(path: Path) -> Path | None:
    """Return the highest folder above ``path`` that other users cannot pass, if there is one."""
    for folder in reversed([path, *path.parents]):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


def script(pod: dict[str, Any], settings: Path, owner: int) -> str:
    """Return the commands that make a mount namespace look like the container's file system.

    The folders of the node belong to ``owner``. The image is this machine's root, read-only.
    """
    user = pod["securityContext"]["runAsUser"]
    code = [Path(p).resolve() for p in (sys.base_prefix, sys.prefix, ROOT)]
    covers = dict.fromkeys(["/tmp", "/var/cache"], "mode=0755")
    covers.update({str(found): "mode=0755" for path in code if (found := blocked(path))})
    covers["/tmp"] = f"mode=2777,gid={user}"  # an emptyDir, with fsGroup
    lines = [
        "set -eu",
        "mount --make-rprivate /",
        "mount -t tmpfs -o mode=0755 tmpfs /run",
        "mkdir -p /run/settings /run/kvcore /run/stage",
        f"cp {settings} /run/settings/server.toml",
        "chmod 0644 /run/settings/server.toml",
    ]
    for number, path in enumerate(code):
        stage = f"/run/stage/{number}"
        lines += [f"mkdir {stage}", f"mount --bind {path} {stage}"]
    lines += [f"mount -t tmpfs -o {options} tmpfs {cover}" for cover, options in covers.items()]
    for number, path in enumerate(code):
        if any(Path(cover) in [path, *path.parents] for cover in covers):
            lines += [f"mkdir -p {path}", f"mount --bind /run/stage/{number} {path}"]
    mode = "0700" if owner == user else "0755"
    for folder in ("/run/kvcore", "/var/cache/kvcore"):
        lines += [
            f"mkdir -p {folder}",
            f"mount -t tmpfs -o mode={mode},uid={owner},gid={owner},size=1G tmpfs {folder}",
        ]
    return "\n".join([*lines, "mount -o remount,bind,ro /", "cd /", 'exec "$@"'])


@contextmanager
def started(tmp_path: Path, owner: int) -> Iterator[Sequence[str]]:
    """Run the pod's server, and yield the command that runs another program beside it."""
    pod, container, settings = server_pod()
    (tmp_path / "server.toml").write_text(settings)
    user = pod["securityContext"]["runAsUser"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
        "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
        "HOME": "/nonexistent",
        "KVCORE__NAMESPACE__SECRET": "0123456789abcdef" * 2,
        "KVCORE__HOST__CAPACITY": "64MiB",
        "KVCORE__SERVER__METRICS": f"127.0.0.1:{free_port()}",
        "KVCORE__EVENTS__ENDPOINT": f"tcp://*:{free_port()}",
        "KVCORE__EVENTS__REPLAY_ENDPOINT": f"tcp://*:{free_port()}",
    }
    rights = [
        "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--bounding-set=-all",
        "--inh-caps=-all", "--no-new-privs", "env", "-i",
        *(f"{name}={value}" for name, value in environment.items()),
    ]  # fmt: skip
    command = [part.replace("/etc/kvcore", "/run/settings") for part in container["command"]]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "bash", "-c", script(pod, tmp_path / "server.toml", owner),
             "bash", *rights, *command],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield ["nsenter", f"--target={process.pid}", "--mount", *rights]
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@pytest.fixture(autouse=True)
def _can_be_confined() -> None:
    done = subprocess.run(["unshare", "--mount", "mount", "--make-rprivate", "/"], check=False)
    if done.returncode:
        lacking("a mount namespace", "cannot be had")


def test_a_server_without_rights_serves(tmp_path: Path) -> None:
    pod, container, _ = server_pod()
    probe = container["livenessProbe"]["exec"]["command"]
    probe = [part.replace("/etc/kvcore", "/run/settings") for part in probe]
    with started(tmp_path, pod["securityContext"]["runAsUser"]) as beside:
        limit = time.monotonic() + DEADLINE_S
        while True:
            asked = subprocess.run([*beside, *probe], capture_output=True, text=True, check=False)
            if asked.returncode == 0:
                break
            assert time.monotonic() < limit, asked.stderr + (tmp_path / "log").read_text()
        wanted = "grep -E '^(Uid|CapBnd|NoNewPrivs)' /proc/self/status; touch /etc/x || echo closed"
        told = subprocess.run(
            [*beside, "sh", "-c", wanted], capture_output=True, text=True, check=False
        ).stdout.split()
    assert told == shlex.split(
        "Uid: 10001 10001 10001 10001 CapBnd: 0000000000000000 NoNewPrivs: 1 closed"
    )


def test_a_server_refuses_a_folder_that_it_was_not_given(tmp_path: Path) -> None:
    """Without `type: Directory` Kubernetes would create the folder, for root."""
    with started(tmp_path, 0):
        limit = time.monotonic() + DEADLINE_S
        while "cannot be" not in (tmp_path / "log").read_text():
            assert time.monotonic() < limit, (tmp_path / "log").read_text()
            time.sleep(0.1)
    told = (tmp_path / "log").read_text()
    assert "server.folder /run/kvcore/server cannot be" in told
