"""Fusion in SGLang's leader: the engine's part of `kvcore.connector.fusion_scheduler`.

A lookup returns [0, stop) as if all of it were stored. A blended request is kept out of SGLang's
tree (`kvcore_sglang.hooks`), so its KV, which is approximate from the first chunk on, is never
shared or offered to kvcore. SGLang counts in pages: the exact prefix and the blend end at a page
boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore._util.outside import decode_json
from kvcore.connector.fusion_messages import BlendTime
from kvcore.connector.fusion_scheduler import FusionRequest, FusionScheduler
from kvcore.errors import ConfigError, FormatError
from kvcore.fusion.options import FusionOptions, fusion_options, shortened
from kvcore.telemetry.metrics import Data
from kvcore.telemetry.rates import ForwardPart

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Asking:
    """The input of fusion: a request's whole prompt and the options it gave, None if none.

    ``fresh`` is True if the request has no answer yet and no KV of its own. Others are computed
    exactly.
    """

    tokens: Tokens
    wishes: Any = None
    fresh: bool = True

    def is_like(self, other: Asking) -> bool:
        """Return True if fusion would do the same for both."""
        same = self.wishes == other.wishes and self.fresh == other.fresh
        return same and np.array_equal(self.tokens, other.tokens)


def wishes_of(req: Any) -> Any:
    """Return what SGLang's request has for kvcore, of any type; None if it has nothing.

    It is the text of a JSON object in ``custom_params["kvcore"]``, because SGLang does not pass on
    nested values.
    """
    params = getattr(req.sampling_params, "custom_params", None)
    return params.get("kvcore") if isinstance(params, Mapping) else None


def asking_of(req: Any) -> Asking:
    """Read SGLang's request."""
    wishes = wishes_of(req)
    fresh = not req.output_ids and getattr(req, "session", None) is None
    return Asking(np.asarray(req.origin_input_ids, dtype=np.int64), wishes, fresh)


def options_of(asking: Asking) -> FusionOptions:
    """Return the request's fusion options. Raises ConfigError if they do not fit."""
    given = asking.wishes
    if isinstance(given, str):
        try:
            given = decode_json(given)
        except FormatError as error:
            raise ConfigError(
                f"custom_params.kvcore is {shortened(given)}, which kvcore cannot read: {error}"
            ) from error
    return fusion_options(given, len(asking.tokens))


class SglangFusionScheduler(FusionScheduler):
    """The fusion scheduler of one engine, used by its leader. Scheduler's thread only."""

    def track(self, rid: str, asking: Asking) -> FusionRequest:
        """Read the fusion options of a request."""
        if not asking.fresh:
            return FusionRequest(rid, FusionOptions(enabled=False))
        options, error = self.read_options(rid, lambda: options_of(asking))
        request = FusionRequest(rid, options, error=error)
        if error:
            self.remember(request)
        return request

    def learn_times(
        self,
        profile: Sequence[tuple[int, float]],
        forwards: Sequence[tuple[Sequence[ForwardPart], float]],
        counted: Data,
        blends: Sequence[BlendTime],
    ) -> None:
        """Learn from the layers, forwards, copies and blends that workers timed, in seconds."""
        if self.policy is not None:
            steps = [(self.policy.time(parts), seconds) for parts, seconds in forwards]
            self.policy.learn(profile, steps, counted, blends)
