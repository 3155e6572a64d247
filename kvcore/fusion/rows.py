"""The rows of a blend on the device, with sizes that the host knows.

    positions   0 1 2 3 . . 7 8 .      the rows of a layer, ascending
    chunk           0 1     2          indices of those with cached KV, in `positions`

No size is ever read from the device. So the host issues layer after layer without waiting.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcore.memory.device import device_of

__all__ = ["LOOK_ROWS", "OnDevice", "Rows", "split_look", "upload_rows"]

LOOK_ROWS = 128
"""The most rows of a look. The walk after it computes its fresh rows once more."""


class Rows(NamedTuple):
    """The rows that a layer computes. All are int64 and ascending, on the device.

    Args:
        positions: [n] positions in the prompt.
        chunk: [c] indices in ``positions`` of the rows with cached KV.
        places: [c] positions of the rows with cached KV.
    """

    positions: Tensor
    chunk: Tensor
    places: Tensor

    def __len__(self) -> int:
        return self.positions.shape[0]


class OnDevice(NamedTuple):
    """What a blend needs of its job on the device.

    Args:
        tokens: [tokens] int64.
        offset_of: [tokens] int64, a row's index in its chunk; -1 without cached KV.
        every: all rows that the blend makes.
        fresh: those of them without cached KV.
        look: positions of the rows of the question's look; see `split_look`.
        unseen: positions without KV that the look leaves out.
    """

    tokens: Tensor
    offset_of: Tensor
    every: Rows
    fresh: Rows
    look: Tensor
    unseen: Tensor


def split_look(
    fresh: npt.NDArray[np.int64], most: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split the positions without KV of a prompt, ascending: those that look, and the others.

    The last rows look, ``most`` at most: the prompt asks something at its end. If the prompt's
    first token has no KV, it takes one of these places, because every row attends to it.
    """
    left = max(len(fresh) - most, 0)
    head = int(left > 0 and fresh[0] == 0 and most > 1)
    first = head + left
    return np.concatenate([fresh[:head], fresh[first:]]), fresh[head:first]


def upload_rows(
    tokens: Tensor,
    exact: int,
    stop: int,
    chunks: Tensor,
    offsets: Tensor,
    split: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    device: torch.device,
) -> OnDevice:
    """Return a job on ``device``, with one upload.

    ``split`` is the `split_look` of the job; the other arguments are those of a `BlendJob`.
    """
    count = len(tokens)
    offset_of = np.full(count, -1, dtype=np.int64)
    offset_of[chunks.numpy()] = offsets.numpy()
    rows = np.arange(exact, stop, dtype=np.int64)
    cached = offset_of[exact:stop] >= 0
    (chunk,) = cached.nonzero()
    parts = [tokens.numpy(), offset_of, rows, chunk, rows[cached], rows[~cached], *split]
    sent = device_of(device).upload(np.concatenate(parts))
    on = torch.split(sent, [len(part) for part in parts])
    none = on[3][:0]
    return OnDevice(on[0], on[1], Rows(*on[2:5]), Rows(on[5], none, none), *on[6:])
