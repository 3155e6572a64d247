"""The hooks of ``kvcore_watching``, which need torch."""

from __future__ import annotations

import itertools
import logging

import torch
from torch import Tensor

from kvcore.fusion.attend import Attention, attend_rows
from kvcore.model.shape import BlockShape
from kvcore.plugins.attention import AttentionCall, AttentionHook

_log = logging.getLogger("kvcore.watching")


class Answer(AttentionHook):
    """Attention of rows that have all their keys with them, from positions and q, k, v alone."""

    name = "answer"

    def __init__(self, shape: BlockShape) -> None:
        self._attention = Attention(shape.head_dim**-0.5)

    def before(self, call: AttentionCall) -> Tensor | None:
        starts = call.batch.starts.tolist()
        assert len(call.batch.requests) + 1 == len(starts)
        whole = []
        for start, stop in itertools.pairwise(starts):
            positions = call.batch.positions[start:stop]
            if not torch.equal(positions, torch.arange(stop - start)):
                return None
            one = (t[start:stop] for t in (call.query, call.key, call.value))
            query, key, value = one
            whole.append(attend_rows(query, positions, key, value, self._attention))
        if call.layer == 0:
            told = zip(call.batch.requests, itertools.pairwise(starts), strict=True)
            for request, (start, stop) in told:
                _log.warning("answered request=%s rows=%d", request, stop - start)
        return torch.cat(whole)


class Silence(AttentionHook):
    """Nothing, in place of what the last layer's attention gives to rows behind a prompt."""

    name = "silence"

    def __init__(self, shape: BlockShape) -> None:
        self._last = shape.layers - 1

    def after(self, call: AttentionCall, output: Tensor) -> Tensor | None:
        decoding = len(call.query) == len(call.batch.requests)
        return torch.zeros_like(output) if call.layer == self._last and decoding else None


class Fail(AttentionHook):
    name = "fail"

    def __init__(self, shape: BlockShape) -> None:
        self._calls = itertools.count(1)

    def after(self, call: AttentionCall, output: Tensor) -> Tensor | None:
        if next(self._calls) == 10:
            raise RuntimeError("the tenth call of a hook that fails")
        return None
