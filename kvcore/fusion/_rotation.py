"""The arithmetic of rotary embeddings: frequencies, and the rotation that moves cached K.

    stored   K_q = R(q f) k        R(a) turns every pair of dimensions (x, y) by its angle:
    wanted   K_p = R(p f) k              x' = x cos a - y sin a,  y' = y cos a + x sin a
    hence    K_p = R((p - q) f) K_q      since R(a) R(b) = R(a + b)

Pair ``i`` turns by ``frequencies[i]`` radians per token. The values are float32. They are computed
by the same float32 operations in the same order as in Transformers and vLLM, so they are equal to
the last bit on the same processor. This matters: at position 100,000, one unit in the last place of
a frequency near 1 turns K by 0.006 radians.

Each scaling is a value. Its ``magnitude`` is the factor that it applies to cos and sin, and so to
K. Cached K contains it already, so moving K does not apply it again.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvcore.errors import ConfigError, LayoutError, UnsupportedError
from kvcore.model.keys import canonical_bytes

__all__ = ["UNSCALED", "Linear", "Llama3", "Pairing", "Rope", "Scaling", "Unscaled", "Yarn"]

_FORMAT = b"kvcore-rope-1"
_ROTATABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _wavelengths(theta: float, dim: int) -> Tensor:
    """Return the positions per radian of each pair, unscaled: float32 [dim / 2]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    powers: Tensor = theta**exponents
    return powers


@dataclass(frozen=True)
class Unscaled:
    """Frequencies theta^(-2i/dim), as in RoFormer (arXiv 2104.09864)."""

    name: ClassVar[str] = "default"
    magnitude: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int) -> Tensor:
        """Return float32 [dim / 2] on the CPU: radians per token of each pair."""
        return 1.0 / _wavelengths(theta, dim)


@dataclass(frozen=True)
class Linear:
    """Position interpolation: every frequency divided by ``factor`` (arXiv 2306.15595)."""

    name: ClassVar[str] = "linear"
    magnitude: ClassVar[float] = 1.0
    factor: float

    def frequencies(self, theta: float, dim: int) -> Tensor:
        """Return float32 [dim / 2] on the CPU: radians per token of each pair."""
        return Unscaled().frequencies(theta, dim) / self.factor


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: low frequencies divided by ``factor``, high ones kept, a ramp in between.

    A frequency is high if its pair turns more than ``high_freq_factor`` times over
    ``original_positions`` tokens, and low if it turns less than ``low_freq_factor`` times.
    """

    name: ClassVar[str] = "llama3"
    magnitude: ClassVar[float] = 1.0
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: float

    def frequencies(self, theta: float, dim: int) -> Tensor:
        """Return float32 [dim / 2] on the CPU: radians per token of each pair."""
        plain = Unscaled().frequencies(theta, dim)
        period = 2 * math.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        keep = (self.original_positions / period - low) / (high - low)
        between = (1 - keep) * plain / self.factor + keep * plain
        stretched = torch.where(
            period > self.original_positions / low, plain / self.factor, between
        )
        return torch.where(period < self.original_positions / high, plain, stretched)


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): a ramp over the pairs, from kept to divided by ``factor``.

    The ramp runs from the pair that turns ``beta_fast`` times over ``original_positions`` tokens
    to the pair that turns ``beta_slow`` times. With ``truncate`` its ends are rounded outwards.
    """

    name: ClassVar[str] = "yarn"
    factor: float
    original_positions: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0

    def frequencies(self, theta: float, dim: int) -> Tensor:
        """Return float32 [dim / 2] on the CPU: radians per token of each pair."""
        wavelengths = _wavelengths(theta, dim)
        kept = 1.0 / wavelengths
        divided = 1.0 / (self.factor * wavelengths)
        keep = 1 - self._ramp(theta, dim)
        return divided * (1 - keep) + kept * keep

    def _ramp(self, theta: float, dim: int) -> Tensor:
        """Return 0 for a frequency that is kept, 1 for one that is divided: float32 [dim / 2]."""
        first = self._pair_that_turns(self.beta_fast, theta, dim)
        last = self._pair_that_turns(self.beta_slow, theta, dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        if first == last:
            last += 0.001
        pairs = torch.arange(dim // 2, dtype=torch.float32)
        return ((pairs - first) / (last - first)).clamp(0, 1)

    def _pair_that_turns(self, times: float, theta: float, dim: int) -> float:
        """Return the (fractional) pair that turns ``times`` times over the original positions."""
        turns = self.original_positions / (times * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))


Scaling = Unscaled | Linear | Llama3 | Yarn
UNSCALED = Unscaled()


class Pairing(str, Enum):
    """Return which two of ``n`` rotated dimensions form pair ``i``."""

    NEOX = "neox"  # i and i + n/2: the two halves
    GPTJ = "gptj"  # 2i and 2i + 1: interleaved


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one layer. A value: ropes with equal fields rotate equally.

    Only the first ``rotary_dim`` of a head's ``head_dim`` dimensions are rotated.
    """

    head_dim: int
    rotary_dim: int
    pairing: Pairing
    theta: float
    scaling: Scaling = UNSCALED

    def __post_init__(self) -> None:
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ConfigError(
                f"rotary_dim {self.rotary_dim} of head_dim {self.head_dim}: "
                "give an even number of dimensions, at most head_dim"
            )

    @cached_property
    def frequencies(self) -> tuple[float, ...]:
        """Radians per token of each pair, rounded as the engines do (float32 values)."""
        return tuple(self.scaling.frequencies(self.theta, self.rotary_dim).tolist())

    @cached_property
    def identity(self) -> bytes:
        """16 bytes for namespaces: K under ropes of different identities must not be mixed.

        They are a hash of what the frequencies are computed from, not of the frequencies, whose
        last bits may differ between processors. YaRN's magnitude is included, because K contains
        it.
        """
        fields = {
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim,
            "pairing": self.pairing.value,
            "theta": self.theta,
            "scaling": {"type": self.scaling.name, **asdict(self.scaling)},
        }
        return hashlib.sha256(_FORMAT + canonical_bytes(fields)).digest()[:16]

    def cos_sin(
        self, distance: int | Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles of a move, each [tokens, rotary_dim / 2].

        ``distance`` is the new position minus the old one, in tokens: an int, which gives one row,
        or an integer tensor [tokens], on whose device the tables are made. Angles are float64, and
        only their cos and sin are rounded: a float32 angle is wrong by 0.03 radians at position
        1,000,000. No magnitude is applied.
        """
        distances = _distances(distance)
        radians = distances.new_tensor(self.frequencies, dtype=torch.float64)
        angles = distances.to(torch.float64)[:, None] * radians
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def shift(self, keys: Tensor, distance: int | Tensor) -> Tensor:
        """Return K as it would be ``distance`` tokens later in the prompt (earlier if negative).

        ``keys`` is [..., tokens, head_dim] after RoPE, bfloat16 or wider. It is not changed: the
        result is a new tensor of the same dtype. ``distance`` is one number for all tokens, or an
        integer tensor [tokens]. The rotation is computed in float32 (in float64 for float64 keys)
        and rounded once. A row at distance 0 keeps its bits. Thread-safe.

        Raises:
            UnsupportedError: keys of a dtype that cannot be rotated, such as fp8.
            LayoutError: shapes that do not fit.
        """
        self._check(keys, distance)
        distances = _distances(distance).to(keys.device)
        if isinstance(distance, int) and not distance:
            return keys.clone()
        wide = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = self.cos_sin(distances, wide)
        turned = self._turn(keys[..., : self.rotary_dim].to(wide), cos, sin).to(keys.dtype)
        moved = torch.cat((turned, keys[..., self.rotary_dim :]), dim=-1)
        return torch.where(distances[:, None] == 0, keys, moved)

    def _turn(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.pairing is Pairing.NEOX:
            x, y = heads.chunk(2, dim=-1)
            return torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1)
        x, y = heads[..., 0::2], heads[..., 1::2]
        return torch.stack((x * cos - y * sin, y * cos + x * sin), dim=-1).flatten(-2)

    def _check(self, keys: Tensor, distance: int | Tensor) -> None:
        if keys.dtype not in _ROTATABLE:
            raise UnsupportedError(
                f"cannot rotate K of {keys.dtype}: a rotated value may exceed the format's range, "
                "and its scale is not known here; unpack it to bfloat16 or wider first"
            )
        if keys.dim() < 2 or keys.shape[-1] != self.head_dim:
            raise LayoutError(
                f"keys of shape {list(keys.shape)}: this rope needs [..., tokens, {self.head_dim}]"
            )
        if isinstance(distance, Tensor) and distance.shape != keys.shape[-2:-1]:
            raise LayoutError(
                f"distances of shape {list(distance.shape)} for keys of {list(keys.shape)}: "
                f"give one integer, or one for each of {keys.shape[-2]} tokens"
            )


def _distances(distance: int | Tensor) -> Tensor:
    """Return integers [tokens] on the device of ``distance``; one row for an int."""
    if not isinstance(distance, Tensor):
        return torch.tensor([distance], dtype=torch.int64)
    if distance.dim() != 1 or distance.is_floating_point() or distance.dtype == torch.bool:
        raise LayoutError(
            f"distances of {distance.dtype} {list(distance.shape)}: give integers [tokens]"
        )
    return distance
