"""Segments over a restart: their file, what damages it, and the thread that writes it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import random
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.fusion import _segment_file as file_module
from kvcore.fusion._chains import ChainPiece
from kvcore.fusion._segment_file import SegmentFile
from kvcore.fusion.segments import Reusable, Segments
from kvcore.model.keys import ROOT_PARENT, Namespace
from support.budget import examples
from support.segment_histories import (
    NO_BOUNDS,
    SPACE,
    SPACES,
    Step,
    Tier,
    everything,
    histories,
    keys_of,
    text,
)

# ---------------------------------------------------------------------------------------------
# over a restart


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segments"


def stored(segments: Segments, prompt: list[int], space: Namespace = SPACES[0]) -> list[bytes]:
    keys = keys_of(prompt, segments.block_tokens, space)
    segments.add(space.digest, keys, 0, prompt)
    return keys


def reopened(path: Path, **options: int) -> Segments:
    segments = Segments(16, path=path, **options)
    segments.check_integrity()
    return segments


@settings(max_examples=examples(80))
@given(histories(), st.integers(1, 5), st.integers(1, 9), st.sets(st.integers(0, 14)))
def test_a_restart_loses_nothing(
    steps: list[Step], block_tokens: int, min_tokens: int, restarts: set[int]
) -> None:
    tier = Tier(block_tokens)
    with tempfile.TemporaryDirectory() as folder:

        def opened() -> Segments:
            path = Path(folder) / "segments"
            return Segments(block_tokens, min_tokens=min_tokens, path=path, **NO_BOUNDS)

        segments = opened()
        again = [Step("find", step.space, step.prompt, 0) for step in steps if step.kind == "store"]
        for i, (kind, number, prompt, choice) in enumerate([*steps, *again]):
            if i in restarts or i == len(steps):
                segments.close()
                segments = opened()
                segments.check_integrity()
            space = SPACES[number]
            if kind == "store":
                tier.store(segments, space, prompt)
            elif kind == "evict":
                tier.evict(choice)
            else:
                found = segments.find(space.digest, prompt, tier.blocks.__contains__)
                tier.check(space.digest, prompt, found, (0, len(prompt)), min_tokens)
        assert segments.corrupt == segments.dropped == 0
        segments.close()


@pytest.mark.parametrize("other", [[0] * 9, [0, 0, *range(1, 8)]], ids=["shares", "parts"])
def test_blocks_behind_a_cut_that_the_file_does_not_know_are_found(
    path: Path, other: list[int]
) -> None:
    """The record of the other blocks has no head: they went on where the segment was cut."""
    segments = Segments(1, min_tokens=9, path=path)
    tier = Tier(1)
    tier.store(segments, SPACES[0], [0] * 8 + [1])
    for key in keys_of([0] * 8 + [1], 1)[2:]:
        del tier.blocks[key]
    assert segments.find(SPACE, [0] * 8 + [1], tier.blocks.__contains__) == []
    tier.store(segments, SPACES[0], other)
    for _ in range(2):
        segments.close()
        segments = Segments(1, min_tokens=9, path=path)
        segments.check_integrity()
        found = segments.find(SPACE, other, tier.blocks.__contains__)
        assert [(run.prompt_start, run.length) for run in found] == [(0, 9)]
    segments.close()


def test_the_file_is_as_specified(path: Path) -> None:
    """Written out here byte by byte: it is read by engines to come."""
    prompt, tokens = list(range(100, 170)), np.arange(100, 170, dtype="<u4")
    keys = keys_of(prompt, 16)
    segments = Segments(16, min_tokens=20, path=path)
    segments.add(SPACE, keys, 2, prompt)
    segments.close()

    def sealed(data: bytes) -> bytes:
        return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))

    body = SPACE + keys[2] + keys[3] + tokens[32 - 19 : 64].tobytes()
    fields = (b"KVSR", 2, 2, 19, 16, keys[1], xxhash.xxh3_64_intdigest(body))
    header = struct.pack("<8sII8x", b"KVCSEGS\0", 1, 16)
    wanted = sealed(header) + sealed(struct.pack("<4s4I16sQ", *fields)) + body
    assert path.read_bytes() == wanted


def test_a_torn_end_is_cut_off_and_writing_goes_on(path: Path) -> None:
    rng = random.Random(20)
    prompts = [text(rng, 160) for _ in range(3)]
    sizes = []
    for prompt in prompts:
        segments = reopened(path)
        stored(segments, prompt)
        segments.close()
        sizes.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in (sizes[2] - 1, sizes[1] + 60, sizes[1] + 52, sizes[1] + 7, sizes[1] + 1, sizes[0]):
        path.write_bytes(whole[:size])
        segments = reopened(path)
        kept = sum(mark <= size for mark in sizes)
        assert path.stat().st_size == sizes[kept - 1]
        assert [bool(segments.find(SPACE, p, everything)) for p in prompts] == [
            i < kept for i in range(3)
        ]
        stored(segments, prompts[2])
        segments.close()
        segments = reopened(path)
        assert segments.find(SPACE, prompts[2], everything)
        assert segments.corrupt == 0
        segments.close()


@pytest.mark.parametrize("size", [0, 1, 31, 32])
def test_a_file_torn_at_its_making_is_made_anew(path: Path, size: int) -> None:
    segments = reopened(path)
    segments.close()
    path.write_bytes(path.read_bytes()[:size])
    prompt = text(random.Random(21), 160)
    segments = reopened(path)
    keys = stored(segments, prompt)
    segments.close()
    assert reopened(path).find(SPACE, prompt, everything) == [Reusable(0, 160, 0, keys[-1])]


def test_damaged_records_are_skipped_and_counted(path: Path) -> None:
    """Whichever byte it is; the others are found."""
    rng = random.Random(22)
    prompts = [text(rng, 96) for _ in range(3)]
    segments = reopened(path)
    for prompt in prompts:
        stored(segments, prompt)
    segments.close()
    whole = path.read_bytes()
    each = (len(whole) - 32) // 3
    for at in (*range(0, 60, 3), 100, 300, each - 1):
        data = bytearray(whole)
        data[32 + each + at] ^= 0x40
        path.write_bytes(data)
        segments = reopened(path)
        found = [segments.find(SPACE, prompt, everything) for prompt in prompts]
        assert [bool(runs) for runs in found] == [True, False, True]
        assert segments.corrupt == 1
        segments.close()


FOREIGN = {
    "format version 2": struct.pack("<8sII16x", b"KVCSEGS\0", 2, 16),
    "not a file of segments": b"the notes of somebody else, kept here by mistake",
    "damaged header": struct.pack("<8sII16x", b"KVCSEGS\0", 1, 16),
}


@pytest.mark.parametrize("reason", FOREIGN)
def test_files_of_others_are_named_and_left_as_they_are(
    path: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = FOREIGN[reason] + bytes(100)
    path.write_bytes(data)
    segments = reopened(path)
    assert reason in caplog.text
    prompt = text(random.Random(23), 160)
    stored(segments, prompt)
    assert segments.find(SPACE, prompt, everything)
    segments.clear()
    segments.close()
    assert path.read_bytes() == data


def test_blocks_of_another_size_are_refused(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    segments = Segments(32, path=path)
    stored(segments, text(random.Random(24), 160))
    segments.close()
    data = path.read_bytes()
    assert len(reopened(path)) == 0
    assert "blocks of 32 tokens, this engine has blocks of 16" in caplog.text
    assert path.read_bytes() == data


def test_a_folder_that_is_not_there_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segments = reopened(tmp_path / "nowhere" / "segments")
    prompt = text(random.Random(25), 160)
    stored(segments, prompt)
    assert segments.find(SPACE, prompt, everything)
    segments.close()
    assert "not kept" in caplog.text


def test_only_the_owner_reads_the_file(path: Path) -> None:
    def mode() -> int:
        return stat.S_IMODE(path.stat().st_mode)

    segments = reopened(path)
    assert mode() == 0o600
    segments.close()
    path.chmod(0o644)
    segments = reopened(path)
    assert mode() == 0o600
    segments.clear()  # another file takes its place
    segments.close()
    assert mode() == 0o600


def test_of_two_engines_one_writes_and_both_read(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(26)
    prompts = [text(rng, 160) for _ in range(3)]
    first = reopened(path)
    stored(first, prompts[0])
    first.close()
    first = reopened(path)
    second = reopened(path)
    assert "written by another engine" in caplog.text
    data = path.read_bytes()
    assert second.find(SPACE, prompts[0], everything)
    stored(second, prompts[1])
    second.clear()
    stored(second, prompts[1])
    second.close()
    assert path.read_bytes() == data
    before = path.stat().st_ino
    first.clear()
    while path.stat().st_ino == before:  # what was locked is another file now
        time.sleep(0.01)
    third = reopened(path)
    stored(third, prompts[1])
    third.close()
    assert path.stat().st_size == 32
    stored(first, prompts[2])
    first.close()
    last = reopened(path)
    found = [bool(last.find(SPACE, prompt, everything)) for prompt in prompts]
    assert found == [False, False, True]
    last.close()


def test_what_is_dead_is_cleared_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "_COMPACT_NBYTES", 4096)
    rng = random.Random(27)
    segments = reopened(path, max_tokens=1000)
    prompts = [text(rng, 160) for _ in range(60)]
    for i, prompt in enumerate(prompts):
        stored(segments, prompt)
        if i % 10 == 9:
            segments.close()
            live = segments.num_tokens * 5 + len(segments) * 100
            assert path.stat().st_size <= max(2 * live, 4096) + 1000
            segments = reopened(path, max_tokens=1000)
            assert segments.num_tokens == 960
    found = [bool(segments.find(SPACE, prompt, everything)) for prompt in prompts]
    assert found == [False] * 54 + [True] * 6
    assert [file.name for file in path.parent.iterdir()] == ["segments"]
    segments.close()


def test_records_of_evicted_tails_die(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "_COMPACT_NBYTES", 1)
    prompt = text(random.Random(28), 640)
    keys = keys_of(prompt, 16)
    segments = reopened(path)
    for done in range(0, 40, 4):
        segments.add(SPACE, keys[: done + 4], done, prompt)
    segments.close()  # all records are in the file before any of them dies
    segments = reopened(path)
    segments.find(SPACE, prompt, set(keys[:10]).__contains__)
    segments.close()
    data = path.read_bytes()
    assert keys[11] in data  # in a record of which a part lives
    assert keys[12] not in data
    segments = reopened(path)
    assert segments.find(SPACE, prompt, set(keys[:10]).__contains__) == [
        Reusable(0, 160, 0, keys[9])
    ]
    segments.close()


def test_what_is_cleared_leaves_no_trace(path: Path) -> None:
    rng = random.Random(29)
    prompt, other = text(rng, 160), text(rng, 160)
    packed = np.array(prompt[:20], dtype="<u4").tobytes()
    segments = reopened(path)
    stored(segments, prompt)
    stored(segments, other, SPACES[1])
    segments.close()
    assert packed in path.read_bytes()
    segments = reopened(path)
    stored(segments, [*prompt, *prompt])
    segments.clear(SPACE)
    segments.close()
    assert packed not in path.read_bytes()
    segments = reopened(path)
    assert segments.find(SPACE, prompt, everything) == []
    assert segments.find(SPACES[1].digest, other, everything)
    segments.clear()
    segments.close()
    assert path.stat().st_size == 32


def test_what_cannot_be_erased_alone_is_erased_with_the_rest(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: SegmentFile, draft: Path) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(SegmentFile, "_copy_to", full)
    rng = random.Random(30)
    segments = reopened(path)
    stored(segments, text(rng, 160))
    stored(segments, text(rng, 160), SPACES[1])
    segments.clear(SPACE)
    segments.close()
    assert path.stat().st_size == 32
    assert "could not be compacted" in caplog.text


# ---------------------------------------------------------------------------------------------
# the writing thread


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk does not answer before this is set; and only threads of ours write."""
    event, write, main = threading.Event(), os.pwrite, threading.main_thread()

    def waits(file: int, data: bytes, offset: int) -> int:
        if offset:
            assert threading.current_thread() is not main
            assert event.wait(60), "the test waits for a write that waits for it"
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", waits)
    yield event
    event.set()


@contextlib.contextmanager
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this block, whatever waits in this thread fails, however short the wait is."""
    caller = threading.get_ident()

    def checked(wait: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            assert threading.get_ident() != caller, f"the caller waits in {wait}"
            return wait(*args, **options)

        return call

    waits = [(threading.Condition, "wait"), (threading.Thread, "join"), (time, "sleep"),
             (os, "fsync"), (os, "fdatasync")]  # fmt: skip
    with monkeypatch.context() as patch:
        for owner, name in waits:
            patch.setattr(owner, name, checked(getattr(owner, name)))
        yield


def test_no_call_waits_for_the_disk(
    path: Path, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(31)
    prompts = [text(rng, 160) for _ in range(5)]
    segments = reopened(path)
    with nothing_waits(monkeypatch):
        for prompt in prompts:
            stored(segments, prompt)
            assert segments.find(SPACE, prompt, everything)
        segments.clear()
        keys = stored(segments, prompts[0])
    stuck.set()
    segments.close()
    segments.close()
    segments = reopened(path)
    assert segments.find(SPACE, prompts[0], everything) == [Reusable(0, 160, 0, keys[-1])]
    assert len(segments) == 1
    segments.close()


def test_a_full_queue_drops_and_counts(path: Path, stuck: threading.Event) -> None:
    tokens = np.arange(64, dtype="<u4")
    piece = ChainPiece(0, ROOT_PARENT, keys_of(tokens.tolist(), 16), 0, tokens)
    file = SegmentFile(path, 16, queue_nbytes=1000)
    assert list(file.records()) == []
    numbers = [file.append(SPACE, piece) for _ in range(5)]
    assert numbers == [1, 2, 0, 0, 0]
    assert file.dropped == 3
    file.start()
    stuck.set()
    file.close()
    assert file.append(SPACE, piece) == 0
    file = SegmentFile(path, 16)
    found = list(file.records())
    file.close()
    assert [kept.number for kept in found] == [1, 2]
    for _, namespace, back in found:
        assert namespace == SPACE
        assert back[:4] == piece[:4]
        assert back.tokens.tolist() == tokens.tolist()


def test_what_dies_in_the_queue_is_not_written(path: Path) -> None:
    tokens = np.arange(32, dtype="<u4")
    keys = keys_of(tokens.tolist(), 16)
    file = SegmentFile(path, 16)
    first = file.append(SPACE, ChainPiece(0, ROOT_PARENT, keys[:1], 0, tokens[:16]))
    file.append(SPACE, ChainPiece(1, keys[0], keys[1:], 0, tokens[16:]))
    file.forget([first])
    file.start()
    file.close()
    assert len(path.read_bytes()) == 32 + 52 + 16 + 16 + 64


def test_the_file_that_is_locked_is_the_one_that_has_the_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, who had the lock put another file there."""
    other = path.with_name("other")
    SegmentFile(other, 16).close()
    flock, calls = fcntl.flock, []

    def replaced(file: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            other.replace(path)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    file = SegmentFile(path, 16)
    assert len(calls) == 2
    assert file.writable
    assert os.path.samestat(os.fstat(file._file), path.stat())
    file.close()


def test_a_failing_disk_drops_and_counts_and_may_come_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(32)
    prompts = [text(rng, 160) for _ in range(4)]
    segments = reopened(path)
    tried = threading.Semaphore(0)
    write = os.pwrite

    def fails(file: int, data: bytes, offset: int) -> int:
        write(file, data[: len(data) // 2], offset)
        tried.release()
        raise OSError(errno.EIO, "the disk is ill")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fails)
        for prompt in prompts[:2]:
            stored(segments, prompt)
            assert tried.acquire(timeout=60)
        while segments.dropped < 2:
            time.sleep(0.01)
        assert path.stat().st_size == 32
    for prompt in prompts[2:]:
        stored(segments, prompt)
    segments.close()
    assert segments.dropped == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "could not be written" in caplog.text
    assert str(prompts[0][0]) not in caplog.text
    segments = reopened(path)
    found = [bool(segments.find(SPACE, prompt, everything)) for prompt in prompts]
    assert found == [False, False, True, True]
    assert segments.corrupt == 0
    segments.close()


def test_a_file_that_is_removed_takes_no_more(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    segments = reopened(path)
    path.unlink()
    for _ in range(2):
        stored(segments, text(random.Random(33), 160))
    segments.close()
    assert segments.dropped > 0
    [line] = [record.message for record in caplog.records]
    assert "it was removed; restart to make it anew" in line


def test_records_of_a_chain_whose_beginning_is_lost_still_serve(path: Path) -> None:
    """They have no head, and are findable by what they hold."""
    prompt = text(random.Random(33), 640)
    keys = keys_of(prompt, 16)
    file = SegmentFile(path, 16)
    tokens = np.array(prompt, dtype="<u4")
    for first in range(10, 40):
        span = tokens[first * 16 : (first + 1) * 16]
        file.append(SPACE, ChainPiece(first, keys[first - 1], [keys[first]], 0, span))
    file.start()
    file.close()
    segments = reopened(path)
    assert len(segments) == 1
    assert segments.find(SPACE, prompt, everything) == [Reusable(160, 480, 160, keys[-1])]
    segments.close()


def test_a_shorter_run_may_count_after_a_restart(path: Path) -> None:
    """Heads kept for the longer one are cut, those for a shorter one serve as they are."""
    rng = random.Random(34)
    trunk = text(rng, 200)
    prompts = [[*trunk, *text(rng, 200)] for _ in range(2)]
    for min_tokens in (64, 24, 100, 64):
        segments = reopened(path, min_tokens=min_tokens)
        for prompt in prompts:
            keys = stored(segments, prompt)
            segments.check_integrity()
            found = segments.find(SPACE, [1, *prompt[50:400]], everything)
            assert sum(run.length for run in found) == 350
            assert [run.source_start - run.prompt_start for run in found] == [49] * len(found)
            assert found[-1].last_key == keys[-1]
        segments.close()


@pytest.mark.parametrize("keyed", [False, True])
def test_with_a_key_no_record_of_anybody_else_is_believed(path: Path, keyed: bool) -> None:
    """A forged record says that a stored block has other tokens: fusion would blend wrong KV."""
    prompt, lie = list(range(1, 161)), list(range(1001, 1161))
    keys = keys_of(prompt, 16)
    key = b"k" * 32 if keyed else b""
    segments = Segments(16, min_tokens=16, path=path, key=key)
    segments.add(SPACE, keys, 0, prompt)
    segments.close()
    tokens = np.array(lie, dtype="<u4")
    for forger in (b"", b"f" * 32):
        forged = ChainPiece(0, ROOT_PARENT, [bytes([len(forger)]) + k[1:] for k in keys], 0, tokens)
        with path.open("ab") as file:
            file.write(file_module._pack(SPACE, forged, forger))
    again = Segments(16, min_tokens=16, path=path, key=key)
    assert again.find(SPACE, prompt, everything)
    assert again.corrupt == (2 if keyed else 1)
    assert bool(again.find(SPACE, lie, everything)) is not keyed
    again.close()


def test_a_file_without_macs_is_not_read_with_a_key(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = list(range(1, 161))
    segments = Segments(16, min_tokens=16, path=path)
    segments.add(SPACE, keys_of(prompt, 16), 0, prompt)
    segments.close()
    before = path.read_bytes()
    again = Segments(16, min_tokens=16, path=path, key=b"k" * 32)
    assert not again.find(SPACE, prompt, everything)
    assert "tokens of stored blocks are not kept" in caplog.text
    again.close()
    assert path.read_bytes() == before


def test_a_file_with_macs_is_counted_and_compacted_without_the_key(path: Path) -> None:
    prompt = list(range(1, 161))
    segments = Segments(16, min_tokens=16, path=path, key=b"k" * 32)
    segments.add(SPACE, keys_of(prompt, 16), 0, prompt)
    segments.close()
    with path.open("ab") as file:
        file.write(b"torn")
    assert file_module.verify(path, repair=True) == (1, 1)
    again = Segments(16, min_tokens=16, path=path, key=b"k" * 32)
    assert again.find(SPACE, prompt, everything)
    again.close()
