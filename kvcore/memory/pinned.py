"""Host memory that a device reaches: registered in chunks, all of it or none.

A chunk is small enough that a thread which registers a large arena can stop soon, and that nobody
waits for long: the driver holds up launches of the whole process while it registers. Drivers limit
one registration too: NVIDIA's from R580 on refuse 512 GiB in 4 KiB pages. A copy whose range is
registered in part fails (`cudaErrorInvalidValue`), and no document says that it may span two
registrations. Chunks therefore end between blocks, so that the copy of a block lies in one chunk.

    memory   |---- chunk ----|---- chunk ----|-- rest --|
    blocks   |--|--|--|--|--|--|--|--|--|--|--|--|--|--|

What the driver asks of the memory: each chunk begins at a page, because two registrations must not
share one; it is mapped for writing; it is not given to a forked child (``MADV_DONTFORK``). Huge
pages are locked as they are. With unified addressing a registration counts for every device of the
process. Processes that map the same file register it each for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import lcm

from kvcore.errors import UnsupportedError
from kvcore.memory.device import Device
from kvcore.memory.hugepages import PAGE

__all__ = ["CHUNK_NBYTES", "PinnedRange"]

CHUNK_NBYTES = 128 << 20
"""The most bytes of a chunk, unless the bytes after which a page and a block end together are more.

On an H200 a launch waited for up to 57 ms while memory was registered in chunks of this size that
nobody had touched, and 10 ms if it had been faulted in. With chunks of 1 GiB it was 428 and 45 ms.
"""


class PinnedRange:
    """``nbytes`` of host memory from ``address``, a multiple of the page size, for ``device``.

    It holds blocks of ``unit`` bytes, one after the other. Call `close` once, from any thread,
    when no copy uses the memory any more.
    """

    def __init__(
        self,
        device: Device,
        address: int,
        nbytes: int,
        unit: int,
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Register the memory. Blocks: 2 to 6 GB a second.

        ``wanted`` is asked before each chunk. Raises UnsupportedError if the device refuses a
        chunk, or if the memory is no longer wanted. Nothing is registered then.
        """
        self._device = device
        self.chunks = 0
        with device.current(), ExitStack() as done:
            for start, size in _chunks(nbytes, unit):
                if not wanted():
                    raise UnsupportedError(f"stopped after {start} bytes")
                try:
                    device.register(address + start, size)
                except UnsupportedError as error:
                    raise UnsupportedError(f"{error} after {start} bytes") from error
                done.callback(device.unregister, address + start)
                self.chunks += 1
            self._registered = done.pop_all()

    def close(self) -> None:
        """Unregister every chunk, the last one first. Blocks."""
        with self._device.current():
            self._registered.close()


def _chunks(nbytes: int, unit: int) -> Iterator[tuple[int, int]]:
    """Yield (start, bytes) of chunks that begin at pages and at blocks."""
    step = lcm(unit, PAGE)
    chunk = max(CHUNK_NBYTES // step, 1) * step
    for start in range(0, nbytes, chunk):
        yield start, min(chunk, nbytes - start)
