"""The file that keeps the tokens of stored blocks across restarts, format version 1.

    header | record | record | ...                 all numbers little-endian and unsigned

    header    0  8s   "KVCSEGS" and a zero byte
              8  u32  version
             12  u32  tokens per block
             16  u32  1 if bodies have a MAC, else 0
             20  4s   zeros
             24  u64  XXH3-64 of bytes 0 .. 24

    record    0  4s   "KVSR"
              4  u32  blocks, at least 1
              8  u32  index of the first block in its chain
             12  u32  head: number of tokens kept from before the first block; at most as many as
                      the chain has there
             16  u32  length of the namespace in bytes
             20  16s  prefix key of the block before the first; zeros if it starts the chain
             36  u64  XXH3-64 of the body; with a key, keyed BLAKE2b of bytes 0 .. 36 and the body
             44  u64  XXH3-64 of bytes 0 .. 44
             52       body: namespace | keys, 16 bytes per block | tokens of the head and of the
                      blocks, 4 bytes each

With a key, nobody else can make fusion believe that a stored block has other tokens than it has.

Records are only appended. A record with a good header and a damaged body is skipped. After a
damaged header, reading continues at the next good one. Bytes after the last whole record are cut
off. A record that starts where an earlier one ends continues its segment and has no head. Blocks
that an earlier record contains are ignored.

A record is dead when all its blocks are forgotten. When more than half of the file is dead, or when
a namespace is cleared, the live records are copied to ``<name>.new``, which then replaces the file.

The file contains the users' text, so its mode is 0600. It is not opened if it is a symbolic link or
belongs to another user. The writer holds a lock (flock) on it; other processes may read it. It is
synced to the medium when it is compacted and when it is closed. After a power cut the checksums
show which records are whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from kvcore._util.fd import is_removed
from kvcore._util.private import open_file
from kvcore._util.threads import GuardedThread
from kvcore.errors import FormatError
from kvcore.fusion._chains import ChainPiece
from kvcore.model.keys import KEY_BYTES, TOKEN_BYTES

__all__ = ["SegmentCounts", "SegmentFile", "SegmentRecord", "verify"]

_log = logging.getLogger("kvcore.fusion.segments")

VERSION = 1
_FILE_MAGIC = b"KVCSEGS\0"
_FILE = struct.Struct("<8sIII4x")
_MAGIC = b"KVSR"
_RECORD = struct.Struct("<4sIIII16sQ")
_SEAL = struct.Struct("<Q")
FILE_HEADER_NBYTES = _FILE.size + _SEAL.size
RECORD_HEADER_NBYTES = _RECORD.size + _SEAL.size
_QUEUE_NBYTES = 16 << 20
CLOSE_S = 30.0
"""Seconds that `SegmentFile.close` waits for the disk."""
_COMPACT_NBYTES = 1 << 20  # a smaller file is not worth compacting


class SegmentRecord(NamedTuple):
    """A record of the file."""

    number: int
    namespace: bytes
    piece: ChainPiece


class _Header(NamedTuple):
    """The fields of a record's header, without its magic and its checksum."""

    blocks: int
    first: int
    head: int
    namespace_nbytes: int
    parent: bytes
    body_digest: int

    @classmethod
    def unpack(cls, data: mmap.mmap, offset: int) -> _Header | None:
        """Return the header at ``offset``; None if it is torn, or if there is none."""
        if offset + RECORD_HEADER_NBYTES > len(data):
            return None
        sealed = data[offset : offset + _RECORD.size]
        (seal,) = _SEAL.unpack_from(data, offset + _RECORD.size)
        magic, *fields = _RECORD.unpack(sealed)
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(sealed) != seal:
            return None
        return cls(*fields)

    def body_nbytes(self, block_tokens: int) -> int:
        per_block = KEY_BYTES + block_tokens * TOKEN_BYTES
        return self.namespace_nbytes + self.blocks * per_block + self.head * TOKEN_BYTES

    def piece(
        self, body: bytes, block_tokens: int, key: bytes | None
    ) -> tuple[bytes, ChainPiece] | None:
        """Return (namespace, piece) of a body; None if it is damaged, forged or impossible.

        Without the ``key`` of a file with MACs (None) the body's digest is not verified.
        """
        fields = self._replace(body_digest=0)
        if key is not None and _body_digest(key, fields, body) != self.body_digest:
            return None
        if not self.blocks or self.head > self.first * block_tokens:
            return None
        start = self.namespace_nbytes
        stop = start + self.blocks * KEY_BYTES
        keys = [body[i : i + KEY_BYTES] for i in range(start, stop, KEY_BYTES)]
        tokens = np.frombuffer(body[stop:], dtype="<u4")
        return body[:start], ChainPiece(self.first, self.parent, keys, self.head, tokens)


def _body_digest(key: bytes, fields: _Header, body: bytes) -> int:
    """Return the checksum of a body; with a key, a MAC over the header's other fields and it."""
    if not key:
        return xxhash.xxh3_64_intdigest(body)
    covered = _RECORD.pack(_MAGIC, *fields)[: -_SEAL.size] + body
    return int.from_bytes(hashlib.blake2b(covered, digest_size=8, key=key).digest(), "little")


def _pack(namespace: bytes, piece: ChainPiece, key: bytes = b"") -> bytes:
    body = b"".join((namespace, *piece.keys, piece.tokens.tobytes()))
    fields = _Header(len(piece.keys), piece.first, piece.head, len(namespace), piece.parent, 0)
    sealed = _RECORD.pack(_MAGIC, *fields._replace(body_digest=_body_digest(key, fields, body)))
    return sealed + _SEAL.pack(xxhash.xxh3_64_intdigest(sealed)) + body


def _nbytes(namespace: bytes, piece: ChainPiece) -> int:
    """Return the size of the record in bytes."""
    body = len(namespace) + len(piece.keys) * KEY_BYTES + piece.tokens.nbytes
    return RECORD_HEADER_NBYTES + body


def _file_header(block_tokens: int, keyed: bool = False) -> bytes:
    header = _FILE.pack(_FILE_MAGIC, VERSION, block_tokens, keyed)
    return header + _SEAL.pack(xxhash.xxh3_64_intdigest(header))


class _Span(NamedTuple):
    """The location of a record in the file."""

    offset: int
    nbytes: int


def _walk(
    data: mmap.mmap, block_tokens: int, key: bytes | None
) -> Iterator[tuple[_Span, tuple[bytes, ChainPiece] | None, bool]]:
    """Yield the location of each record, its content, and whether damaged bytes precede it.

    The content is None if the body is damaged. The walk ends after the last complete record.
    """
    at, damaged = FILE_HEADER_NBYTES, False
    while 0 <= at < len(data):
        header = _Header.unpack(data, at)
        if header is None:
            damaged = True
            at = data.find(_MAGIC, at + 1)
            continue
        start = at + RECORD_HEADER_NBYTES
        stop = start + header.body_nbytes(block_tokens)
        if stop > len(data):
            return
        yield _Span(at, stop - at), header.piece(data[start:stop], block_tokens, key), damaged
        at, damaged = stop, False


class SegmentCounts(NamedTuple):
    """How many records of a file are whole, and how many are damaged."""

    records: int
    corrupt: int


def verify(path: Path, *, repair: bool = False) -> SegmentCounts | None:
    """Read every record of a file and count them. Return None if an engine is writing it.

    Bodies with a MAC are not verified, because their key is not known here.

    With ``repair`` only the whole records are kept; otherwise the file is not changed. Raises
    FormatError if it is not a file of segments, and OSError if it cannot be read.
    """
    with open(open_file(path, os.O_RDONLY, adopt=True), "rb") as file:
        header = file.read(FILE_HEADER_NBYTES)
    whole = len(header) == FILE_HEADER_NBYTES
    block_tokens, keyed = _FILE.unpack_from(header)[2:] if whole else (0, 0)
    if header != _file_header(block_tokens, bool(keyed)):
        raise FormatError(_what_it_is(header, block_tokens))
    store = SegmentFile(path, block_tokens, key=None if keyed else b"")
    try:
        if not store.writable:
            return None
        return store.count(repair=repair)
    finally:
        store.close()


class SegmentFile:
    """A file of chain pieces. Each record has a number, by which it can be declared dead.

    Open the file, consume `records`, then call `start`. After that, one thread may call `append`,
    `forget` and `close`. A background thread writes, so only `close` waits for the disk. Records
    are dropped and counted in `dropped` if the queue is full or the disk fails. If the thread dies
    the file is emptied, because nobody could erase from it any more, and takes nothing more.
    """

    def __init__(
        self,
        path: Path,
        block_tokens: int,
        *,
        key: bytes | None = b"",
        queue_nbytes: int = _QUEUE_NBYTES,
    ) -> None:
        """Open the file, or create it. It is read-only if another engine is writing it.

        With a ``key`` its records have a MAC. None stands for a file of such records whose key is
        not known: it can be counted and compacted, but not written.

        Raises OSError if the file cannot be opened. Raises FormatError, and leaves the file
        unchanged, if it holds something else.
        """
        self.corrupt = 0
        self.dropped = 0
        self._path = path
        self._block_tokens = block_tokens
        self._key = key
        self._file, self.writable = _open(path)
        try:
            self._check_header()
            if self.writable:
                _draft(path).unlink(missing_ok=True)  # left by an interrupted compaction
        except BaseException:
            os.close(self._file)
            raise
        self._end = FILE_HEADER_NBYTES
        self._spans: dict[int, _Span] = {}  # of live records by number, in file order
        self._live = 0  # bytes of live records
        self._last = 0
        self._queue_nbytes = queue_nbytes
        self._failing = False
        self._thread: GuardedThread | None = None
        self._wake = threading.Condition()
        # Guarded by _wake:
        self._pending: list[SegmentRecord] = []
        self._pending_nbytes = 0
        self._dead: set[int] = set()
        self._erase = False
        self._closing = False
        self._closed = False

    # -- the caller's side ----------------------------------------------------------------------

    def records(self) -> Iterator[SegmentRecord]:
        """Yield the whole records, count the damaged ones, and cut off a torn end. Blocks."""
        if os.fstat(self._file).st_size > FILE_HEADER_NBYTES:
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as data:
                yield from self._scan(data)
        if self.writable:
            os.ftruncate(self._file, self._end)

    def count(self, *, repair: bool) -> SegmentCounts:
        """Read and count every record, in place of `records`. ``repair`` drops damaged ones."""
        if os.fstat(self._file).st_size > FILE_HEADER_NBYTES:
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as data:
                for _ in self._scan(data):
                    pass
        torn = os.fstat(self._file).st_size != self._end
        counts = SegmentCounts(len(self._spans), self.corrupt + torn)
        if repair and counts.corrupt:
            self._compact()
        return counts

    def start(self) -> None:
        """Start writing, unless another engine is writing the file."""
        if not self.writable:
            _log.warning("%s is written by another engine: tokens are not kept", self._path)
            return
        self._thread = GuardedThread("kvcore-segments", self._run, self._lose)
        self._thread.start()

    def append(self, namespace: bytes, piece: ChainPiece) -> int:
        """Queue a record for writing. Return its number, or 0 if it is dropped."""
        if not self.writable:
            return 0
        nbytes = _nbytes(namespace, piece)
        with self._wake:
            if self._closing or self._pending_nbytes + nbytes > self._queue_nbytes:
                self.dropped += 1
                return 0
            self._last += 1
            self._pending.append(SegmentRecord(self._last, namespace, piece))
            self._pending_nbytes += nbytes
            self._wake.notify()
        return self._last

    def forget(self, numbers: Iterable[int], *, erase: bool = False) -> None:
        """Declare records dead. With ``erase``, also remove all dead records from the file."""
        if not self.writable:
            return
        with self._wake:
            if not self._closing:
                self._dead.update(numbers)
                self._erase |= erase
                self._wake.notify()

    def close(self) -> None:
        """Write what is queued, flush and close. Blocks up to `CLOSE_S` seconds. Idempotent.

        The file stays open if the thread still writes to it then.
        """
        with self._wake:
            if self._closed:
                return
            self._closing = self._closed = True
            self._wake.notify()
        if self._thread is not None:
            if not self._thread.join(CLOSE_S):
                return
            with contextlib.suppress(OSError):  # checksums show which records are whole
                os.fsync(self._file)
        os.close(self._file)

    # -- reading --------------------------------------------------------------------------------

    def _check_header(self) -> None:
        """Check the file's header, or write it if the file is new."""
        wanted = _file_header(self._block_tokens, self._key != b"")
        header = os.pread(self._file, FILE_HEADER_NBYTES, 0)
        if header == wanted:
            return
        if len(header) < len(wanted) and wanted.startswith(header):  # new, or torn at its creation
            if self.writable:
                _write(self._file, wanted, 0)
            return
        raise FormatError(f"{_what_it_is(header, self._block_tokens)}: it is left unchanged")

    def _scan(self, data: mmap.mmap) -> Iterator[SegmentRecord]:
        for span, found, damaged in _walk(data, self._block_tokens, self._key):
            self.corrupt += damaged + (found is None)
            if found is not None:
                self._last += 1
                self._enter(self._last, span)
                yield SegmentRecord(self._last, *found)
            self._end = span.offset + span.nbytes

    def _enter(self, number: int, span: _Span) -> None:
        self._spans[number] = span
        self._live += span.nbytes

    # -- the writing thread ---------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._wake:
                while not (self._pending or self._dead or self._erase or self._closing):
                    self._wake.wait()
                pending, self._pending, self._pending_nbytes = self._pending, [], 0
                dead, self._dead = self._dead, set()
                erase, self._erase = self._erase, False
                closing = self._closing
            self._append_all([kept for kept in pending if kept.number not in dead])
            for number in dead & self._spans.keys():
                self._live -= self._spans.pop(number).nbytes
            crowded = self._end > max(2 * self._live, _COMPACT_NBYTES)
            if (crowded or erase) and not self._compact() and erase:
                self._empty()

    def _lose(self, error: BaseException) -> None:
        """Empty the file, and drop what is queued and what comes."""
        with self._wake:
            self._closing = True
            self.dropped += len(self._pending)
            self._pending, self._pending_nbytes = [], 0
        self._empty()
        _log.error("tokens of stored blocks are kept no more, and %s is emptied", self._path)

    def _append_all(self, records: list[SegmentRecord]) -> None:
        assert self._key is not None
        packed = [_pack(kept.namespace, kept.piece, self._key) for kept in records]
        try:
            if packed and is_removed(self._file):
                raise FileNotFoundError(errno.ENOENT, "it was removed; restart to make it anew")
            _write(self._file, b"".join(packed), self._end)
        except OSError as error:
            with contextlib.suppress(OSError):  # the next write starts at the same offset
                os.ftruncate(self._file, self._end)
            self._failed("written", error)
            self.dropped += len(records)
            return
        for kept, data in zip(records, packed, strict=True):
            self._enter(kept.number, _Span(self._end, len(data)))
            self._end += len(data)
        self._failing = False

    def _compact(self) -> bool:
        """Copy the live records to a new file, and replace this one by it."""
        try:
            file, spans = self._copy_to(_draft(self._path))
        except OSError as error:
            self._failed("compacted", error)
            return False
        os.close(self._file)
        self._file, self._spans = file, spans
        self._end = FILE_HEADER_NBYTES + self._live
        return True

    def _empty(self) -> None:
        """Drop the live records too, because keeping the file would keep erased text."""
        self._spans, self._live, self._end = {}, 0, FILE_HEADER_NBYTES
        try:
            os.ftruncate(self._file, self._end)
        except OSError as error:
            self._failed("erased", error)

    def _copy_to(self, draft: Path) -> tuple[int, dict[int, _Span]]:
        file = open_file(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, adopt=True)
        spans = {}
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file, _file_header(self._block_tokens, self._key != b""), 0)
            end = FILE_HEADER_NBYTES
            for number, (offset, nbytes) in self._spans.items():
                _write(file, os.pread(self._file, nbytes, offset), end)
                spans[number] = _Span(end, nbytes)
                end += nbytes
            os.fsync(file)
            draft.replace(self._path)
        except BaseException:
            os.close(file)
            raise
        return file, spans

    def _failed(self, what: str, error: OSError) -> None:
        if not self._failing:
            _log.warning("%s could not be %s: %s", self._path, what, error)
        self._failing = True


def _open(path: Path) -> tuple[int, bool]:
    """Return the open file, and whether this process holds its lock."""
    while True:
        file = open_file(path, os.O_RDWR | os.O_CREAT, adopt=True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.lstat(path)):
                return file, True
        except BlockingIOError:
            return file, False
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was compacted and replaced meanwhile


def _draft(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def _what_it_is(header: bytes, block_tokens: int) -> str:
    if len(header) < FILE_HEADER_NBYTES or not header.startswith(_FILE_MAGIC):
        return "not a file of segments"
    _, version, theirs, _ = _FILE.unpack_from(header)
    if version != VERSION:
        return f"segments of format version {version}, this kvcore reads {VERSION}"
    (seal,) = _SEAL.unpack_from(header, _FILE.size)
    if xxhash.xxh3_64_intdigest(header[: _FILE.size]) != seal:
        return "a file of segments with a damaged header"
    return f"segments in blocks of {theirs} tokens, this engine has blocks of {block_tokens}"
