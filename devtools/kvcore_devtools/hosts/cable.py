"""A cable that delays and drops frames, as a child process: ``python cable.py NEAR FAR``.

    NEAR ── TAP ──▶ held for the delay, some dropped ──▶ TAP ── FAR     and the same the other way

It is for kernels without sch_netem. It creates both devices in its own network namespace and prints
"ready". Each line on its standard input, ``DELAY_S JITTER_S LOSS SEED``, sets the cable and is
answered with "ready". It ends, and its devices with it, when its standard input closes. Like
`keeper`, it uses only Python's standard library.

A TAP without offloads receives whole frames, no longer than its MTU and with checksums, because the
kernel does the work of the hardware first. Therefore each frame is dropped or delayed on its own,
as on a wire.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from collections.abc import Iterator

__all__ = ["MAX_FRAMES", "Line"]

MAX_FRAMES = 20_000
"""Most frames in flight in one direction: 30 MB of 1514-byte frames, one second at 240 Mbit/s."""
_AT_ONCE = 64
"""Frames to read from one direction before the other direction and due frames have their turn."""
_FRAME_NBYTES = 1 << 16
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000


class Line:
    """One direction of a cable: decides which frames get through, and when. Times are in seconds.

    A frame is dropped with probability ``loss``. Otherwise it takes ``delay_s`` plus or minus up to
    ``jitter_s``, so that frames may overtake each other; without jitter they never do. Equal values
    of ``seed`` drop the same frames. Frames beyond `MAX_FRAMES` are dropped.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, bytes]] = []
        self._count = 0
        self.become(0.0, 0.0, 0.0, "")

    def become(self, delay_s: float, jitter_s: float, loss: float, seed: str) -> None:
        """Set the conditions for later frames. Frames in flight keep their times."""
        self._delay_s, self._jitter_s, self._loss = delay_s, jitter_s, loss
        self._losing, self._late = random.Random(f"{seed} loss"), random.Random(f"{seed} jitter")

    def put(self, frame: bytes, now: float) -> None:
        if self._loss and self._losing.random() < self._loss:
            return
        if len(self._queue) >= MAX_FRAMES:
            return
        late = self._delay_s
        if self._jitter_s:
            late = max(late + self._late.uniform(-self._jitter_s, self._jitter_s), 0.0)
        self._count += 1
        heapq.heappush(self._queue, (now + late, self._count, frame))

    def take(self, now: float) -> Iterator[bytes]:
        """Yield the frames that are due, in the order of arrival."""
        while self._queue and self._queue[0][0] <= now:
            yield heapq.heappop(self._queue)[2]

    @property
    def due(self) -> float | None:
        """Return when the next frame is due, or None without frames."""
        return self._queue[0][0] if self._queue else None


def _tap(name: str) -> int:
    """Create a TAP device, which exists as long as the returned descriptor is open."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tun


def _read(tap: int, line: Line) -> None:
    for _ in range(_AT_ONCE):
        try:
            frame = os.read(tap, _FRAME_NBYTES)
        except BlockingIOError:
            return
        line.put(frame, time.monotonic())


def _write(tap: int, frame: bytes) -> None:
    try:
        os.write(tap, frame)
    except OSError:  # the device is not connected, so the frame is lost
        return


def _carry(near: int, far: int) -> None:
    """Pass frames on until standard input ends."""
    lines = {near: (far, Line()), far: (near, Line())}
    while True:
        times = [line.due for _, line in lines.values() if line.due is not None]
        timeout = max(min(times) - time.monotonic(), 0.0) if times else None
        ready, _, _ = select.select([0, near, far], [], [], timeout)
        if 0 in ready:
            told = os.read(0, 4096).decode().split()
            if not told:
                return
            delay_s, jitter_s, loss = map(float, told[:3])
            for name, (_, line) in zip(("out", "in"), lines.values(), strict=True):
                line.become(delay_s, jitter_s, loss, f"{told[3]} {name}")
            os.write(1, b"ready\n")
        for tap, (other, line) in lines.items():
            if tap in ready:
                _read(tap, line)
            for frame in line.take(time.monotonic()):
                _write(other, frame)


def main() -> None:
    near, far = map(_tap, sys.argv[1:])
    os.write(1, b"ready\n")
    _carry(near, far)


if __name__ == "__main__":
    main()
