"""What is logged: one line each, whatever a client sent."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvcore import log

FORGED = "r7\n2026-11-23 00:00:00,000 INFO kvcore.admin: an order {}\r\x1b[2J\u2028\x00"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger("kvcore")
    handlers, level, propagate = list(root.handlers), root.level, root.propagate
    yield
    root.handlers, root.propagate = handlers, propagate
    root.setLevel(level)


@pytest.mark.parametrize("own", [True, False])
def test_a_client_cannot_write_a_line_of_its_own(
    own: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """With kvcore's handler, and with those that the engine's process has."""
    if own:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log.configure("info", "text")
    logging.getLogger("kvcore.server").info("refused id=%s", FORGED)
    log.get_logger("kvcore.x").info(f"refused {FORGED}", request=FORGED)
    text = capsys.readouterr().err if own else caplog.text
    assert len(text.splitlines()) == 2
    assert r"id=r7\n2026-11-23" in text
    assert not set("\r\x1b\u2028\x00") & set(text)


def test_a_traceback_has_no_line_that_looks_like_the_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log.configure("info", "text")
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("kvcore.server").exception("an order failed")
    first, *others = capsys.readouterr().err.splitlines()
    assert first.endswith("an order failed")
    assert any("ValueError: r7" in line for line in others)
    assert all(line.startswith("  ") for line in others)


def test_an_ordinary_message_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    log.configure("info", "text")
    logging.getLogger("kvcore.server").info("café %d", 7)
    [record] = caplog.records
    assert (record.msg, record.args) == ("café %d", (7,))
