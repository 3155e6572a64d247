"""README.md's own lines, in environments made for them.

Blocks behind a comment ``<!-- tested: NAME -->`` are run by bash, as they stand, in a copy of this
checkout. Three things differ from a reader's machine, because they would take longer than the
project gives its tests (minutes and gigabytes for vLLM's build) or need a model hub:

- vLLM is not installed anew: the environment sees the packages of the one these tests run in, which
  ``make env`` has made. kvcore is not among them; pip installs it from the checkout.
- ``MODEL=`` names a local copy of the same model; for the server, a smaller one.
- the server gets a free port, and does not compile the model.

`make test` runs the lines that install kvcore and those of the server, `make test-all` the others.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.harness.models import smollm2, tiny_model
from support.front_door import post

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "results", "__pycache__", "*.so", "node_modules", "site")
START_S, STEP_S = 240, 400


def block(name: str) -> str:
    """The lines of the README's block of that name."""
    text = (ROOT / "README.md").read_text()
    [found] = re.findall(rf"<!-- tested: {name} -->\n+```[a-z]*\n(.*?)```", text, re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme") / "kvcore"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    return folder


class Shell:
    """bash in the checkout, with the environment in ``folder`` activated and no other."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.bin = folder / "bin"
        self.site = next((folder / "lib").glob("python*/site-packages"))
        self._checkout = checkout
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        self._env = {**kept, "PATH": path, "VIRTUAL_ENV": str(folder), "HF_HUB_OFFLINE": "1"}

    def start(self, lines: str, log: Path) -> subprocess.Popen[bytes]:
        command = ["bash", "-euo", "pipefail", "-c", lines]
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=self._checkout,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, lines: str, log: Path) -> str:
        """What they print, errors too. AssertionError where they fail."""
        process = self.start(lines, log)
        assert process.wait(STEP_S) == 0, log.read_text()[-3000:]
        return log.read_text()


def shell(folder: Path, checkout: Path) -> Shell:
    venv.create(folder, with_pip=True)
    return Shell(folder, checkout)


@pytest.fixture(scope="module")
def beside_vllm(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Shell:
    """An environment that has vLLM, and kvcore by the README's lines."""
    folder = tmp_path_factory.mktemp("beside")
    made = shell(folder / "env", checkout)
    (made.site / "engine.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = made.bin / "vllm"
    command.write_text(
        f"#!{made.bin}/python\nfrom vllm.entrypoints.cli.main import main\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    command.chmod(0o755)
    listed = made.run(block("install"), folder / "log")
    assert "KVCoreConnector" in listed, listed
    assert (made.site / "kvcore").is_dir(), "kvcore was not installed into the new environment"
    return made


@pytest.mark.exhaustive
def test_an_empty_environment(tmp_path: Path, checkout: Path) -> None:
    """kvcore's own requirements suffice for kvcore's own command."""
    made = shell(tmp_path / "env", checkout)
    listed = made.run(block("install"), tmp_path / "log")
    assert "policy" in listed
    assert "not installed" in listed, "there is an engine in an empty environment"


@pytest.mark.exhaustive
def test_the_offline_lines(beside_vllm: Shell, tmp_path: Path) -> None:
    local = f"MODEL={smollm2()}"
    lines, names = re.subn(r"^MODEL=\S+", local, block("offline"), flags=re.MULTILINE)
    assert names == 1
    printed = beside_vllm.run(lines, tmp_path / "log")
    reused = re.findall(r"(\w+) answer: .* reused by tier: (\{.*?\})", printed)
    assert [name for name, _ in reused] == ["first", "second"] * 2
    assert [re.findall(r"'(\w+)'", tiers) for _, tiers in reused] == [
        [], ["host"], ["disk"], ["host"],
    ]  # fmt: skip


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    return found


@pytest.fixture
def model() -> Path:
    """One that is given text."""
    return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64, vocabulary=None)


@pytest.fixture
def address(beside_vllm: Shell, model: Path, port: int, tmp_path: Path) -> Iterator[str]:
    options = f"--port {port} --max-model-len 2048 --enforce-eager"
    lines, starts = re.subn(r"vllm serve \$MODEL", rf"\g<0> {options}", block("serve"))
    assert starts == 1
    own = f"MODEL={model}\nexport VLLM_SERVER_DEV_MODE=1  # vLLM's cache can then be reset\n"
    process = beside_vllm.start(own + lines, tmp_path / "log")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.exhaustive
def test_the_server_lines(address: str, model: Path, tmp_path: Path) -> None:
    limit = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            break
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < limit, (tmp_path / "log").read_text()[-3000:]
            time.sleep(1)
    body = {
        "model": str(model),
        "prompt": "The quick brown fox jumps over the lazy dog. " * 20,
        "max_tokens": 1,
        "kv_transfer_params": {"kvcore": {"report": True}},
    }
    cold, warm = (asked(address, body) for _ in range(2))
    assert cold["tiers"] == {}
    assert warm["tiers"].keys() == {"host"}


def asked(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """kvcore's report on a prompt. Afterwards vLLM's own cache is empty."""
    told = post(address, "/v1/completions", body)
    time.sleep(1)  # saves end in the background
    post(address, "/reset_prefix_cache")
    report: dict[str, Any] = told["kv_transfer_params"]["kvcore"]
    return report
