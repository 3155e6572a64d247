"""Attacker: an operator, or a client, who wants an order carried out that leaves no trace."""

import json
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("zmq")

import zmq

from kvcore import log
from kvcore.admin import commands as o
from kvcore.admin.audit import AuditLog
from kvcore.admin.endpoint import WAITING
from kvcore.admin.messages import ControlRequest, frames
from kvcore.cli.ctl import Target, ask, parse_where
from kvcore.config import Config, load_config
from kvcore.errors import ConfigError, KVCoreError
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import serve, server_process, settings, words

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
ME = f"uid {os.geteuid()} pid {os.getpid()}"
EVERYTHING = o.ClearBlocks(parse_where(["all"]))


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def served(tmp_path: Path, audit: Path) -> Iterator[tuple[Config, ReferenceEngine, int]]:
    """Start a server with an audit log, and an engine that has saved KV in it."""
    config = settings(tmp_path / "kv")
    folder, shared = f"server.folder={tmp_path / 'kv'}", "server.address=local"
    host = ["host.capacity=16MiB", "host.huge_pages=false"]
    with (
        server_process(folder, shared, *host, f"control.audit={audit}") as server,
        ReferenceEngine(random_llama(), EngineArgs(prefix_cache=False), config) as engine,
    ):
        serve(engine, words(1, 100))
        until(lambda: held(config) == 6)
        yield config, engine, server.pid


def order(config: Config, what: Any) -> dict[str, Any]:
    return ask(Target(config, "", None, 60.0), what)


def held(config: Config) -> int:
    blocks: int = sum(row["blocks"] for row in order(config, o.ListBlocks())["rows"])
    return blocks


def states(audit: Path) -> list[str]:
    return [json.loads(line)["state"] for line in audit.read_text().splitlines()]


def test_an_order_that_cannot_be_written_is_not_carried_out(
    served: tuple[Config, ReferenceEngine, int], audit: Path
) -> None:
    """The file may not grow, as on a full disk. The last line that fits is written in part."""
    config, engine, server = served
    for room in (0, 10):
        limit = audit.stat().st_size + room
        resource.prlimit(server, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(KVCoreError, match=r"nothing is done, because control\.audit"):
            order(config, EVERYTHING)
        resource.prlimit(server, resource.RLIMIT_FSIZE, UNLIMITED)
        assert held(config) == 6
    assert serve(engine, words(1, 100))[1] == {"host": 96}
    assert order(config, EVERYTHING)["blocks"] == 6
    torn, *whole = audit.read_text().splitlines()
    assert len(torn) == 10
    assert [json.loads(line)["state"] for line in whole][-2:] == ["begun", "done"]


def test_an_order_is_not_carried_out_without_the_file(
    served: tuple[Config, ReferenceEngine, int], audit: Path
) -> None:
    config, _, _ = served
    audit.unlink()
    with pytest.raises(KVCoreError, match="the file was removed"):
        order(config, EVERYTHING)
    assert held(config) == 6


def test_orders_that_are_refused_are_written_with_their_reason(
    served: tuple[Config, ReferenceEngine, int], audit: Path
) -> None:
    config, _, _ = served
    with pytest.raises(KVCoreError, match="no tenant 'eve"):
        order(config, o.ClearBlocks(o.BlockFilter(tenant='eve\n{"forged": 1}', salt=None)))
    with pytest.raises(KVCoreError, match="0 models are meant"):
        ask(Target(config, "ff" * 16, None, 60.0), EVERYTHING)
    with pytest.raises(KVCoreError):
        order(config, o.SetQuota("a b", "host", "1GiB", salt="a secret"))
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["order"] for line in lines if line["state"] == "refused"] == [
        "clear",
        "clear",
        "quota",
    ]
    assert all(line["who"] == ME for line in lines)
    assert all(line["why"] for line in lines if line["state"] == "refused")
    assert "a secret" not in audit.read_text()


def test_an_order_that_came_too_many_is_written(tmp_path: Path, audit: Path) -> None:
    """The engine does not step, so its leader takes no order."""
    address = f"ipc://{tmp_path}/ctl"
    tables = {
        "host": {"capacity": "16MiB", "huge_pages": False},
        "control": {"address": address, "audit": str(audit)},
    }
    with ReferenceEngine(random_llama(), EngineArgs(), load_config(None, tables)) as engine:
        client: Any = zmq.Context.instance().socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(address)
        for ref in range(WAITING + 3):
            client.send_multipart(frames(ControlRequest(ref, EVERYTHING)))
        until(lambda: len(states(audit)) == 3)
        assert states(audit) == ["refused"] * 3
        assert "wait already" in audit.read_text()
        client.close(0)
        until(lambda: bool(engine.step()) or len(states(audit)) == 3 + 2 * WAITING)


def test_the_file_of_another_is_not_appended_to(audit: Path) -> None:
    audit.write_text("")
    audit.chmod(0o622)
    with pytest.raises(ConfigError, match=r"control\.audit .* its mode is 0622"):
        AuditLog(str(audit))


def test_a_line_in_the_log_cannot_be_forged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file, the log is the record. What a client sent is on one line with its sender."""
    root = logging.getLogger("kvcore")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(root, name, getattr(root, name))
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    log.configure("info", "text")
    forged = 'r7\n2026-11-23 00:00:00,000 INFO kvcore.admin: an order {"state": "done"}'
    logging.getLogger("kvcore.server").warning("refused kind=%s: %s", "misfit", forged)
    AuditLog().end(ME, "clear", "refused", why=forged)
    lines = caplog.text.splitlines()
    assert len(lines) == 2
    assert sum(line.partition(" ")[2].startswith("an order") for line in lines) <= 1
