"""Faults of media: a tier, a remote store, and the files of the disk tier."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TypeVar

from kvcore.errors import CorruptBlock, Mismatch, TierError, TierUnavailable
from kvcore.memory.buffers import Buffers, nbytes_of
from kvcore.memory.device_region import DeviceRegion
from kvcore.memory.hugepages import PAGE, Pages
from kvcore.testing.faults.plan import Fault, Faults, Seam, Strike, die
from kvcore.tiers.base import BlockRead, BlockRecord, BlockWrite, DeviceRead, Tier
from kvcore.tiers.disk import DiskTier
from kvcore.tiers.disk.files import IndexFile
from kvcore.tiers.disk.gds import DirectReader, Pick
from kvcore.tiers.disk.io import Move, Mover, Outcome, Outcomes, write_all
from kvcore.tiers.geometry import RECORD_NBYTES
from kvcore.tiers.remote.base import BlockStore, Item

__all__ = ["FaultyStore", "FaultyTier", "into_disk"]

_Request = TypeVar("_Request", BlockRead, BlockWrite, DeviceRead)
_SAID = {Fault.ERROR: errno.EIO, Fault.FULL: errno.ENOSPC}
_OTHERS = tuple(set(Fault) - set(_SAID))
_ORDER = (Fault.REORDER,)
_ONE_BY_ONE = tuple(set(Fault) - {Fault.REORDER})


def _os_error(strike: Strike) -> OSError:
    code = _SAID[strike.fault]
    return OSError(code, f"{os.strerror(code)} (an injected fault)")


# -- tiers and stores -----------------------------------------------------------------------


class FaultyTier(Tier):
    """A tier that wraps ``inner`` and has faults at `Seam.TIER_READ` and `Seam.TIER_WRITE`."""

    def __init__(self, inner: Tier, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults
        self.slot_nbytes = inner.slot_nbytes

    def attach(self, memory: memoryview) -> None:
        self.inner.attach(memory)

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        return self._some(Seam.TIER_WRITE, requests, self.inner.write)

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        return self._some(Seam.TIER_READ, requests, self.inner.read)

    def attach_device(self, region: DeviceRegion) -> str:
        return self.inner.attach_device(region)

    def read_device(self, requests: Sequence[DeviceRead]) -> list[TierError | None]:
        return self._some(Seam.TIER_READ, requests, self.inner.read_device)

    def invalidate(self, slots: Iterable[int]) -> None:
        self.inner.invalidate(slots)

    def scan(self) -> list[BlockRecord]:
        return self.inner.scan()

    def sync(self) -> None:
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def _some(
        self,
        seam: Seam,
        requests: Sequence[_Request],
        call: Callable[[Sequence[_Request]], list[TierError | None]],
    ) -> list[TierError | None]:
        """Pass the requests that no fault strikes to ``call``."""
        self.faults.meet(seam, _OTHERS)
        results: list[TierError | None] = [self._refusal(seam) for _ in requests]
        good = [i for i, error in enumerate(results) if error is None]
        for i, error in zip(good, call([requests[i] for i in good]), strict=True):
            results[i] = error
        return results

    def _refusal(self, seam: Seam) -> TierError | None:
        strike = self.faults.at(seam, tuple(_SAID))
        return None if strike is None else TierUnavailable(str(_os_error(strike)))


class FaultyStore(BlockStore):
    """A remote store that wraps ``inner``. Faults strike once per value and once per lookup."""

    def __init__(self, inner: BlockStore, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    def attach(self, memory: memoryview) -> None:
        self.inner.attach(memory)

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        return [self._put(item) for item in items]

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        return [self._get(item) for item in items]

    def exists(self, names: Sequence[str]) -> list[bool]:
        strike = self.faults.meet(Seam.STORE_EXISTS)
        if strike is not None:
            raise TierUnavailable(str(_os_error(strike)))
        return self.inner.exists(names)

    def node(self, ranks: int) -> str:
        return self.inner.node(ranks)

    def delete(self, names: Sequence[str]) -> None:
        self.inner.delete(names)

    def close(self) -> None:
        self.inner.close()

    def _put(self, item: Item) -> TierError | None:
        strike = self.faults.meet(Seam.STORE_PUT)
        if strike is not None:
            if strike.fault in _SAID:
                return TierUnavailable(str(_os_error(strike)))
            if strike.fault is Fault.LOST:
                return None
            item = Item(item.name, [_spoilt(item.parts, strike)])
        return self.inner.put([item])[0]

    def _get(self, item: Item) -> TierError | None:
        strike = self.faults.meet(Seam.STORE_GET)
        if strike is not None and strike.fault is Fault.ERROR:
            return TierUnavailable(str(_os_error(strike)))
        [error] = self.inner.get([item])
        if error is None and strike is not None:
            if strike.fault is Fault.SHORT_READ:
                return CorruptBlock(
                    f"value {item.name} was cut short by an injected fault", Mismatch.TRUNCATED
                )
            _flip(item.parts, strike.draw)
        return error


# -- the disk tier's files ------------------------------------------------------------------


def into_disk(tier: DiskTier, faults: Faults) -> DiskTier:
    """Put faults under an open disk tier: at `Seam.FILE_READ`, `FILE_WRITE`, `RECORD` and `SYNC`.

    Only the tier's own files are affected, not those of foreign stores. Nothing may be in flight.
    Returns the tier.
    """
    data = tier._data
    data._mover = _FaultyMover(data._mover, faults)
    if tier._direct is not None:
        tier._direct = _FaultyDirect(tier._direct, faults)
    sync = data.sync

    def flush() -> None:
        _flush(faults, sync)

    data.sync = flush  # type: ignore[method-assign]
    tier._index = _FaultyRecords(tier._index, faults)
    return tier


def _flush(faults: Faults, sync: Callable[[], None]) -> None:
    strike = faults.meet(Seam.SYNC)
    if strike is not None:
        raise _os_error(strike)
    sync()


class _FaultyMover(Mover):
    """A mover that wraps ``inner``; some of its moves fail."""

    def __init__(self, inner: Mover, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def move(self, file: int, moves: Iterable[Move], *, write: bool) -> Outcomes:
        run = _Moves(self._faults, file, moves, write)
        late = self._faults.at(run.seam, _ORDER) is not None
        held: list[tuple[int, Outcome]] = []
        with closing(self._inner.move(file, run.begun(), write=write)) as ended:
            for tag, outcome in ended:
                pair = tag, run.ended(tag, outcome)
                if late:
                    held.append(pair)
                else:
                    yield pair
        yield from reversed(held)
        yield from run.not_moved

    def close(self) -> None:
        self._inner.close()


class _FaultyDirect(DirectReader):
    """A direct reader that wraps ``inner``; some of its reads into device memory fail."""

    def __init__(self, inner: DirectReader, faults: Faults) -> None:
        self.backend = inner.backend
        self._inner = inner
        self._faults = faults

    def read(self, picks: Sequence[Pick]) -> list[str | None]:
        late = self._faults.at(Seam.FILE_READ, _ORDER) is not None
        struck: dict[Pick, Strike] = {}
        failed: dict[Pick, str] = {}
        for pick in picks:
            strike = self._faults.at(Seam.FILE_READ, _ONE_BY_ONE)
            if strike is None:
                continue
            if strike.fault in _SAID:
                failed[pick] = str(_os_error(strike))
            elif strike.fault in (Fault.SHORT_READ, Fault.BIT_FLIP):
                struck[pick] = strike
            else:
                self._faults.endure(strike)
        going = [pick for pick in picks if pick not in failed]
        going = going[::-1] if late else going
        failed |= {p: why for p, why in zip(going, self._inner.read(going), strict=True) if why}
        for pick, strike in struck.items():
            self._spoil(pick, strike)
        return [failed.get(pick) for pick in picks]

    def close(self) -> None:
        self._inner.close()

    def _spoil(self, pick: Pick, strike: Strike) -> None:
        """Flip a bit of the block, or invert all bytes after a short read."""
        region = self._inner.region
        first = pick.place * region.slot_nbytes
        block = region.tensor[first : first + region.shape.nbytes]
        bit = strike.draw % (8 * len(block))
        if strike.fault is Fault.SHORT_READ:
            block[bit // 8 :] = ~block[bit // 8 :]
        else:
            block[bit // 8] ^= 1 << bit % 8


class _Moves:
    """The moves of one call, as faults change them.

    ``begun`` yields the moves for the mover. ``not_moved`` has the outcomes of those that it never
    gets.
    """

    def __init__(self, faults: Faults, file: int, moves: Iterable[Move], write: bool) -> None:
        self.seam = Seam.FILE_WRITE if write else Seam.FILE_READ
        self.not_moved: list[tuple[int, Outcome]] = []
        self._faults = faults
        self._file = file
        self._moves = moves
        self._struck: dict[int, tuple[Strike, Move]] = {}

    def begun(self) -> Iterator[Move]:
        for move in self._moves:
            strike = self._faults.at(self.seam, _ONE_BY_ONE)
            if strike is None or strike.fault in (Fault.LATENCY, Fault.HANG):
                if strike is not None:
                    self._faults.endure(strike)
                yield move
            elif strike.fault in _SAID:
                self.not_moved.append((move.tag, _os_error(strike)))
            elif self.seam is Seam.FILE_WRITE:
                yield from self._spoil(move, strike)
            elif strike.fault is Fault.KILL:
                die()
            else:
                self._struck[move.tag] = strike, move
                yield move

    def _spoil(self, move: Move, strike: Strike) -> Iterator[Move]:
        """Write part of the move, or yield it with a flipped bit."""
        if strike.fault is Fault.BIT_FLIP:
            yield move._replace(buffers=[_spoilt(move.buffers, strike)])
            return
        part = _spoilt(move.buffers, strike)
        pages = part.nbytes // PAGE
        arrived = part[: strike.draw % max(pages, 1) * PAGE]
        if arrived.nbytes:
            write_all(self._file, [arrived], move.offset)
        if strike.fault is Fault.KILL:
            die()
        self.not_moved.append((move.tag, nbytes_of(move.buffers)))

    def ended(self, tag: int, outcome: Outcome) -> Outcome:
        strike, move = self._struck.pop(tag, (None, None))
        if strike is None or move is None or isinstance(outcome, OSError):
            return outcome
        _flip(move.buffers, strike.draw)
        return strike.draw % max(outcome, 1) if strike.fault is Fault.SHORT_READ else outcome


class _FaultyRecords(IndexFile):
    """An index file that takes over what ``inner`` has; some of its writes fail."""

    def __init__(self, inner: IndexFile, faults: Faults) -> None:
        self.__dict__ |= vars(inner)
        self._faults = faults

    def sync(self) -> None:
        _flush(self._faults, super().sync)

    def _write(self, slot: int, data: bytes) -> None:
        strike = self._faults.at(Seam.RECORD)
        if strike is None:
            super()._write(slot, data)
        elif strike.fault in _SAID:
            raise _os_error(strike)
        elif strike.fault is Fault.BIT_FLIP:
            flipped = memoryview(bytearray(data))
            _flip([flipped], strike.draw)
            super()._write(slot, bytes(flipped))
        elif strike.fault in (Fault.TORN_WRITE, Fault.KILL):
            with self._file as number:
                os.pwrite(number, data[: strike.draw % len(data)], slot * RECORD_NBYTES)
            self._faults.endure(strike)
        else:
            self._faults.endure(strike)
            super()._write(slot, data)


# -- bytes ----------------------------------------------------------------------------------


def _spoilt(parts: Buffers, strike: Strike) -> memoryview:
    """Return a copy of ``parts``, padded to whole pages, with a bit flipped or the end cut off."""
    total = nbytes_of(parts)
    copy = Pages(-(-total // PAGE) * PAGE, huge=False).view[:total]
    start = 0
    for part in parts:
        copy[start : start + part.nbytes] = part.cast("B")
        start += part.nbytes
    if strike.fault is Fault.BIT_FLIP:
        _flip([copy], strike.draw)
    elif strike.fault is Fault.TORN_WRITE:
        keep = strike.draw % total
        copy[keep:] = bytes(total - keep)
    return copy


def _flip(parts: Buffers, draw: int) -> None:
    bit = draw % (8 * nbytes_of(parts))
    place = bit // 8
    for part in parts:
        if place < part.nbytes:
            part.cast("B")[place] ^= 1 << bit % 8
            return
        place -= part.nbytes
