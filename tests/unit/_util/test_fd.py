"""A number that is given back is not used again, by nobody."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kvcore._util.fd import Descriptor

WAIT_S = 60.0


def opened(path: Path) -> tuple[Descriptor, int]:
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    return Descriptor(number), number


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_after_it_is_closed_every_use_says_so(tmp_path: Path) -> None:
    file, number = opened(tmp_path / "a")
    with file as used:
        assert used == number
    file.close()
    assert not is_open(number)
    other = os.open(tmp_path / "b", os.O_RDWR | os.O_CREAT, 0o600)
    assert other == number, "the system gives the number to the next"
    try:
        with pytest.raises(OSError, match="closed") as raised, file:
            pass
        assert raised.value.errno == errno.EBADF
        file.close()
        assert is_open(other), "closing twice closes nobody else's"
    finally:
        os.close(other)


def test_a_use_under_way_keeps_the_number_and_its_end_gives_it_back(tmp_path: Path) -> None:
    file, number = opened(tmp_path / "a")
    inside, leave = threading.Event(), threading.Event()

    def use() -> None:
        with file as used:
            inside.set()
            leave.wait(WAIT_S)
            os.write(used, b"whole")

    thread = threading.Thread(target=use)
    thread.start()
    assert inside.wait(WAIT_S)
    file.close()
    assert is_open(number)
    with pytest.raises(OSError, match="closed"), file:
        pass
    leave.set()
    thread.join(WAIT_S)
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert not is_open(number)
