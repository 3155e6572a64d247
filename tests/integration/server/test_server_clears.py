"""Clears that a server did not hear or confirm: what was to go is found by nobody."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvcore.config import Config
from kvcore.errors import TierUnavailable
from kvcore.model.keys import KEY_BYTES
from kvcore.server import messages as m
from kvcore.server.pending_clears import PendingClears
from kvcore.testing.waiting import until
from kvcore.transfer.graph import OpReport, Span
from kvcore_devtools.server_fixture import RunningServer, settings
from support.server_wire import MODEL, SPACE, join, keys, save, units
from support.transfers import save_blocks

Start = Callable[[Config], RunningServer]


def test_what_was_not_cleared_is_not_found(start: Start, folder: Path) -> None:
    config = settings(folder)
    server = start(config)
    manager, outbox = join(config)
    graph = save_blocks(manager, keys(4), SPACE, 4, units)
    assert graph is not None
    manager.complete(OpReport(graph.graph_id, 0))
    before = manager.get_match(keys(4), SPACE)
    assert before.depth == 4
    clear = server.server._handlers.pop(m.ClearRequest)
    assert manager.clear() == 0
    assert manager.get_match(keys(4), SPACE).depth == 0, "the server has them still"
    with pytest.raises(TierUnavailable, match="no server that could load"):
        manager.plan_load(before, Span(0, 4))
    assert outbox.graphs == [graph], "what was found before is not loaded either"
    server.server._handlers[m.ClearRequest] = clear
    assert manager.get_match(keys(4), SPACE).depth == 0
    [space] = server.server.models
    assert space.used["host"][0] == 0, "it was asked again, before the lookup"
    manager.close()


def test_all_that_is_owed_a_clear_is_cleared_and_nothing_else(start: Start, folder: Path) -> None:
    server = start(settings(folder))
    manager, _ = join(settings(folder))
    spaces = [bytes([n]) * KEY_BYTES for n in (1, 2, 3)]
    for seed, space in enumerate(spaces):
        save(manager, keys(4, seed), space)

    def owe(*namespaces: bytes | None) -> None:
        clear = server.server._handlers.pop(m.ClearRequest)
        for namespace in namespaces:
            assert manager.clear(namespace) == 0
        server.server._handlers[m.ClearRequest] = clear

    [model] = server.server.models
    owe(*spaces[:2])
    assert manager.get_match(keys(4, 2), spaces[2]).depth == 4
    assert model.used["host"][0] == 4, "both were cleared before the lookup"
    owe(None, spaces[0])
    assert manager.get_match(keys(4, 2), spaces[2]).depth == 0, "all of them"
    manager.close()


@pytest.mark.parametrize("told", ["null", "one", "damaged"])
def test_a_clear_that_was_written_down_is_paid_before_anyone_is_welcome(
    start: Start, folder: Path, told: str
) -> None:
    """That of this model, and only of the namespaces it names, as far as it can be read."""
    config = settings(folder)
    server = start(config)
    manager, _ = join(config)
    other = b"o" * KEY_BYTES
    save(manager, keys(4, 0))
    save(manager, keys(4, 1), other)
    foreign = PendingClears(folder, msgspec.structs.replace(MODEL, fingerprint=b"another"))
    foreign.write(None)
    owed = PendingClears(folder, MODEL)
    owed.write(None if told == "null" else [SPACE])
    if told == "damaged":
        next(p for p in folder.glob("cleared-*") if p != foreign._path).write_text('["')
    late, _ = join(config)
    assert late.get_match(keys(4, 0), SPACE).depth == 0
    assert late.get_match(keys(4, 1), other).depth == (4 if told == "one" else 0)
    assert list(folder.glob("cleared-*")) == [foreign._path], "it waits for its model"
    server.server.check_integrity()
    manager.close()
    late.close()


def test_a_server_that_was_not_heard_in_time_pays_while_its_client_says_nothing(
    start: Start, folder: Path
) -> None:
    """Others must not find meanwhile what the client wanted cleared."""
    server = start(settings(folder))
    manager, _ = join(settings(folder))
    save(manager, keys(4))
    del server.server._handlers[m.ClearRequest]
    assert manager.clear() == 0
    [space] = server.server.models
    until(lambda: space.used["host"][0] == 0)
    until(lambda: not list(folder.glob("cleared-*")))
    manager.close()


def test_a_clear_that_is_confirmed_leaves_no_note(start: Start, folder: Path) -> None:
    start(settings(folder))
    manager, _ = join(settings(folder))
    save(manager, keys(4))
    assert manager.clear() == 4
    assert not list(folder.glob("*cleared-*"))
    manager.close()


def test_a_clear_that_cannot_be_written_down_is_named(
    start: Start, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(settings(folder))
    manager, _ = join(settings(folder))
    save(manager, keys(4))
    manager._clear_file._path = folder / "no" / "folder" / "cleared-x-y"
    assert manager.clear() == 4
    assert "lost if this engine ends" in caplog.text
    manager.close()
