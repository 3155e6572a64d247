"""Values as files in a folder, on this host or on a file system that hosts share.

    <path>/<name>                 a complete value
    <path>/.writing/<random>      a value being written; renamed to its name when it is complete

A call to a file system or to NIXL cannot be interrupted. Therefore each call runs in its own
thread, on its own channel, and is abandoned after its timeout. The channel is reused once the
abandoned call has ended. The caller's memory is never passed to such a call.
"""

from __future__ import annotations

import os
import queue
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from pydantic import Field, field_validator

from kvcore._util.threads import GuardedThread
from kvcore.config.fields import FolderPath, Seconds
from kvcore.errors import (
    BlockMissing,
    ConfigError,
    TierError,
    TierUnavailable,
    UnsupportedError,
)
from kvcore.memory.buffers import nbytes_of
from kvcore.memory.nixl import CHANNEL_NBYTES, FileAgent, FileSpan
from kvcore.tiers.remote.base import BlockStore, Item, copy_bytes, fill, wrong_size
from kvcore.tiers.remote.files.channel import Channel
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.tier import StoreKind

T = TypeVar("T")

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not block
_WRITING = ".writing"
_STALE_S = 24 * 3600
"""Age in seconds at which the writer of a file in ``.writing`` has certainly ended."""
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_BACKENDS = ("GDS_MT", "GDS", "POSIX")


class FileOptions(StoreOptions):
    """The folder, and the NIXL backend that transfers the bytes."""

    known_by = ("path",)

    path: FolderPath = Field(
        description="Folder for the blocks, on this host or mounted by every host."
    )
    backend: Literal["POSIX", "GDS", "GDS_MT", "auto"] = Field(
        default="POSIX",
        description="NIXL's backend. `auto`: the first of GDS_MT, GDS and POSIX that starts.",
    )
    timeout_s: Seconds = Field(
        default=5.0, description="Seconds after which a call to the file system has failed."
    )

    @field_validator("prefix")
    @classmethod
    def _is_no_hidden_folder(cls, prefix: str) -> str:
        if prefix.startswith("."):
            raise ConfigError(f"given {prefix!r}; a prefix must not start with a dot here")
        return prefix


class _Job:
    """A borrowed channel and the calls made on it, one at a time, until the time is over."""

    def __init__(self, channel: Channel, until: float) -> None:
        self.channel = channel
        self.ended: Future[object] = Future()
        self.ended.set_result(None)
        self._until = until

    def run(self, work: Callable[[Channel], T]) -> T:
        """Run ``work`` in its own thread, and return or raise its outcome.

        Raises TierUnavailable if it is late; the thread then goes on in the background.
        """
        outcome: Future[T] = Future()

        def settle() -> None:
            try:
                outcome.set_result(work(self.channel))
            except Exception as error:  # noqa: BLE001 - thread boundary: raised on the other side
                outcome.set_exception(error)

        thread = GuardedThread("kvcore-files", settle, outcome.set_exception)
        if not thread.start():
            raise TierUnavailable(f"no thread for file I/O can be started: {thread.error}")
        self.ended = outcome  # type: ignore[assignment]  # only waited for
        try:
            return outcome.result(max(0.0, self._until - time.monotonic()))
        except Late:
            raise TierUnavailable("the file system did not answer in time") from None
        except OSError as error:
            raise TierUnavailable(f"the file system reports an error: {error}") from error


class _Staged(NamedTuple):
    """An item and its place in a channel: the offset ``start`` and the size, both in bytes."""

    item: Item
    start: int
    nbytes: int


class FileStore(BlockStore):
    """Files in the folder ``root``.

    At most ``channels`` calls run at a time. Each has a channel of 16 MiB, or of the size of the
    largest value; only memory that is used becomes resident.
    """

    def __init__(self, root: Path, backend: str, *, channels: int, timeout_s: float) -> None:
        self._root = root
        self._timeout = timeout_s
        self._channels = channels
        self._closed = False
        self._free: queue.LifoQueue[Channel] = queue.LifoQueue()
        for _ in range(channels):
            self._free.put(Channel(backend))

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        def move(job: _Job, staged: Sequence[_Staged], view: memoryview) -> list[TierError | None]:
            for one in staged:
                start = one.start
                for part in one.item.parts:
                    copy_bytes(part, view[start : start + part.nbytes])
                    start += part.nbytes
            return job.run(lambda channel: self._write(channel, staged))

        return self._move(items, move)

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        def move(job: _Job, staged: Sequence[_Staged], view: memoryview) -> list[TierError | None]:
            errors = job.run(lambda channel: self._read(channel, staged))
            for one, error in zip(staged, errors, strict=True):
                if error is None:
                    fill(one.item, view[one.start : one.start + one.nbytes])
            return errors

        return self._move(items, move)

    def exists(self, names: Sequence[str]) -> list[bool]:
        with self._job(self._limit()) as job:
            return job.run(lambda _: [self._is_there(name) for name in names])

    def delete(self, names: Sequence[str]) -> None:
        def remove(_: Channel) -> None:
            for name in names:
                with suppress(*_NOT_THERE):
                    (self._root / name).unlink()

        with self._job(self._limit()) as job:
            job.run(remove)

    def close(self) -> None:
        self._closed = True
        with suppress(queue.Empty):
            while True:
                self._free.get_nowait().close()

    # -- channels ------------------------------------------------------------------------------

    def _limit(self) -> float:
        return time.monotonic() + self._timeout

    @contextmanager
    def _job(self, until: float) -> Iterator[_Job]:
        try:
            channel = self._free.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TierUnavailable(
                f"{self._root}: all {self._channels} channels are in use by calls that hang"
            ) from None
        job = _Job(channel, until)
        try:
            yield job
        finally:
            job.ended.add_done_callback(lambda _: self._put_back(channel))

    def _put_back(self, channel: Channel) -> None:
        if self._closed:
            channel.close()
        else:
            self._free.put(channel)

    def _move(
        self,
        items: Sequence[Item],
        move: Callable[[_Job, Sequence[_Staged], memoryview], list[TierError | None]],
    ) -> list[TierError | None]:
        """Call ``move`` on the items, in batches that fit a channel."""
        until = self._limit()
        results: list[TierError | None] = []
        for staged in _in_lanes(items):
            with self._job(until) as job:
                view = job.channel.room(staged[-1].start + staged[-1].nbytes)
                results += move(job, staged, view)
        return results

    # -- files, in a job's thread -----------------------------------------------------------

    def _read(self, channel: Channel, staged: Sequence[_Staged]) -> list[TierError | None]:
        opened = [self._open(one) for one in staged]
        spans = [one for one in opened if isinstance(one, FileSpan)]
        try:
            found = iter(channel.move("READ", spans))
        finally:
            for span in spans:
                os.close(span.fd)
        return [next(found) if isinstance(one, FileSpan) else one for one in opened]

    def _open(self, staged: _Staged) -> FileSpan | TierError:
        """Open the file of a value; an error if it is missing or has the wrong size."""
        name = staged.item.name
        try:
            fd = os.open(self._root / name, _READ)
        except _NOT_THERE:
            return BlockMissing(f"no file {name}")
        except OSError as error:
            return TierUnavailable(f"file {name}: {error.strerror}")
        found = os.fstat(fd)
        if found.st_size == staged.nbytes and stat.S_ISREG(found.st_mode):
            return FileSpan(fd, staged.start, staged.nbytes)
        os.close(fd)
        return wrong_size(staged.item, found.st_size)

    def _write(self, channel: Channel, staged: Sequence[_Staged]) -> list[TierError | None]:
        made = [self._make(one) for one in staged]
        spans = [one[0] for one in made if isinstance(one, tuple)]
        try:
            moved = iter(channel.move("WRITE", spans))
        except TierUnavailable as error:
            moved = iter([error] * len(spans))
        finally:
            for span in spans:
                os.close(span.fd)
        return [
            self._publish(one.item.name, file[1], next(moved)) if isinstance(file, tuple) else file
            for one, file in zip(staged, made, strict=True)
        ]

    def _make(self, staged: _Staged) -> tuple[FileSpan, Path] | TierError:
        """Create a file and reserve its space, so that a full file system fails here.

        Not every version of NIXL reports a short write.
        """
        path = self._root / _WRITING / secrets.token_hex(16)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, staged.nbytes)
            except OSError:
                os.close(fd)
                path.unlink()
                raise
        except OSError as error:
            return TierUnavailable(f"file {staged.item.name} cannot be written: {error.strerror}")
        return FileSpan(fd, staged.start, staged.nbytes), path

    def _publish(self, name: str, written: Path, error: TierError | None) -> TierError | None:
        """Rename a complete file to its name, or remove it if the write failed."""
        if error is None:
            try:
                self._rename(written, self._root / name)
            except OSError as refused:
                error = TierUnavailable(f"file {name} cannot be renamed: {refused.strerror}")
        if error is not None:
            with suppress(OSError):
                written.unlink()
        return error

    def _rename(self, written: Path, path: Path) -> None:
        try:
            written.replace(path)
        except FileNotFoundError:
            _make_folders(self._root, path.parent)
            written.replace(path)

    def _is_there(self, name: str) -> bool:
        try:
            return stat.S_ISREG((self._root / name).stat(follow_symlinks=False).st_mode)
        except _NOT_THERE:
            return False

    def sweep(self) -> None:
        """Remove files that dead writers have left. Raises OSError."""
        with suppress(*_NOT_THERE):
            for left in (self._root / _WRITING).iterdir():
                with suppress(FileNotFoundError):  # another process may sweep too
                    if time.time() - left.stat().st_mtime > _STALE_S:
                        left.unlink()


def _make_folders(root: Path, folder: Path) -> None:
    """Create folders that only their owner may access.

    `Path.mkdir` applies its mode to the last folder only.
    """
    if folder != root and not folder.parent.is_dir():
        _make_folders(root, folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _in_lanes(items: Sequence[Item]) -> Iterator[list[_Staged]]:
    """Yield batches of items, each placed contiguously in the memory of one channel.

    An item larger than a channel makes a batch of its own, for which the channel grows.
    """
    staged: list[_Staged] = []
    at = 0
    for item in items:
        nbytes = nbytes_of(item.parts)
        if staged and at + nbytes > CHANNEL_NBYTES:
            yield staged
            staged, at = [], 0
        staged.append(_Staged(item, at, nbytes))
        at += nbytes
    if staged:
        yield staged


def open_store(options: FileOptions, rank: int | None = None) -> FileStore:
    """Open the store and create its folder.

    Raises ConfigError if the folder cannot be created, and UnsupportedError if NIXL or its backend
    is not available.
    """
    backend = _backend(options.backend)
    store = FileStore(
        options.path,
        backend,
        channels=2 * options.parallel + 1,  # one per thread of `StoreTier`, one for its registry
        timeout_s=options.timeout_s,
    )
    try:
        options.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        store.sweep()
    except OSError as error:
        raise ConfigError(f"path {options.path}: {error.strerror}") from error
    return store


def _backend(wanted: str) -> str:
    """Return the first wanted backend that starts. Raises UnsupportedError if none does."""
    refusals = []
    for backend in _BACKENDS if wanted == "auto" else (wanted,):
        refusal = _refusal(backend)
        if refusal is None:
            return backend
        refusals.append(str(refusal))
    raise UnsupportedError(f"backend {wanted!r}: {'; '.join(refusals)}")


def _refusal(backend: str) -> TierUnavailable | None:
    """Return why NIXL does not start a backend; None if it does."""
    try:
        FileAgent(backend)
    except TierUnavailable as error:
        return error
    return None


KIND = StoreKind(FileOptions, open_store)
