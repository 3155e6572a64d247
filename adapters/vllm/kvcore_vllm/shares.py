"""How the states of a layer are divided among ranks, and into a share for each KV head.

vLLM divides a layer with states among tensor-parallel ranks as it does its projections. An array of
a state is, along one axis, a row of sections, such as the q, k and v of a gated delta net, and a
rank has an equal range of each:

    of the model   │ q0 q1 q2 q3 │ k0 k1 k2 k3 │ v0 v1 v2 v3 │
    rank 0 of 2    │ q0 q1 │ k0 k1 │ v0 v1 │
    rank 1 of 2    │ q2 q3 │ k2 k3 │ v2 v3 │

With as many equal shares as the model has KV heads, each rank has those of its own heads. The
sections follow from the model's config. They are believed only if they give the shapes that vLLM
tells of its caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import MambaSpec

__all__ = ["StateShares", "state_shares"]


class StateShares(NamedTuple):
    """The states of one group of layers, on a rank that has ``heads`` KV heads of a layer.

    ``share`` are the bytes that one head has of each section of a state, and ``shapes`` those of
    the arrays of the whole model's state. Both are the same at any number of ranks.
    """

    share: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    heads: int

    @property
    def sections(self) -> tuple[int, ...]:
        """The sections of `StateGroup`."""
        return tuple(nbytes * self.heads for nbytes in self.share)


class _Told(NamedTuple):
    """What a model's config says of one layer's state, of the whole model.

    ``conv`` are the sections of the convolution's channels, of which the state has those of the
    last ``kernel`` - 1 tokens. ``recurrent`` is the shape of the second array, whose first axis is
    divided; empty if there is none. ``atoms`` are numbers of heads and groups, none of which may be
    divided.
    """

    conv: tuple[int, ...]
    kernel: int
    recurrent: tuple[int, ...] = ()
    atoms: tuple[int, ...] = ()


def state_shares(vllm_config: VllmConfig, specs: Sequence[MambaSpec]) -> tuple[StateShares, ...]:
    """Return how the states of each group are divided into a share for each KV head of the model.

    ``specs`` are those of the groups on one rank. Empty if one of them cannot be divided so, or if
    its arrays are not understood.
    """
    heads = int(vllm_config.model_config.get_total_num_kv_heads())
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if heads < 2 or heads % ranks:
        return ()
    config = vllm_config.model_config.hf_text_config
    found = [_shares(config, spec, heads, ranks) for spec in specs]
    shares = tuple(each for each in found if each is not None)
    return shares if len(shares) == len(found) else ()


def _shares(config: Any, spec: MambaSpec, heads: int, ranks: int) -> StateShares | None:
    told = _told(config, spec)
    parts = (*told.conv, *told.recurrent[:1], *told.atoms)
    if getattr(spec, "tp_replicated", False) or any(n < 1 or n % heads for n in parts):
        return None
    rows, dims = told.kernel - 1, sum(told.conv)
    channels_last = _over(ranks, (rows, dims), 1)
    expected = [channels_last, *([_over(ranks, told.recurrent, 0)] if told.recurrent else [])]
    if rows == dims // ranks:  # nobody can tell the two orders of such an array apart
        return None
    if by_channel := spec.shapes[:1] == (channels_last[::-1],):
        expected[0] = channels_last[::-1]
    if spec.shapes != tuple(expected):
        return None
    sizes = [dtype.itemsize for dtype in spec.dtypes]
    width, times = (rows, 1) if by_channel else (1, rows)
    share = [n // heads * width * sizes[0] for n in told.conv] * times
    share += [prod(told.recurrent) // heads * size for size in sizes[1:]]
    whole = (dims, rows) if by_channel else (rows, dims)
    shapes = (whole, *([told.recurrent] if told.recurrent else []))
    found = StateShares(tuple(share), shapes, heads // ranks)
    return found if sum(found.sections) == spec.state_content_size_bytes else None


def _over(ranks: int, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(n // ranks if i == axis else n for i, n in enumerate(shape))


def _told(config: Any, spec: MambaSpec) -> _Told:
    kind = str(getattr(spec.mamba_type, "name", spec.mamba_type)).lower()
    return _KINDS[kind](config) if kind in _KINDS else _Told((0,), 0)


def _short_convolution(config: Any) -> _Told:
    dims = _number(config, "conv_dim") or _number(config, "hidden_size")
    return _Told((dims,), _number(config, "conv_L_cache"))


def _gated_delta_net(config: Any) -> _Told:
    """Its channels are q, k and v; its matrices are of the heads of v."""
    keys, values = (_number(config, f"linear_num_{name}_heads") for name in ("key", "value"))
    key, value = (_number(config, f"linear_{name}_head_dim") for name in ("key", "value"))
    conv = (keys * key, keys * key, values * value)
    kernel = _number(config, "linear_conv_kernel_dim")
    return _Told(conv, kernel, (values, value, key), (keys, values))


def _mamba(config: Any) -> _Told:
    dims = _number(config, "mamba_expand") * _number(config, "hidden_size")
    recurrent = dims, _number(config, "mamba_d_state")
    return _Told((dims,), _number(config, "mamba_d_conv"), recurrent)


def _mamba2(config: Any) -> _Told:
    """Its channels are x, B and C; heads share the B and C of a group.

    Where there are fewer groups than ranks, vLLM gives each rank a copy. Then they do not divide by
    the number of KV heads either.
    """
    heads = _number(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    groups = _number(config, "n_groups", "mamba_n_groups", "mamba_ngroups")
    dim = _number(config, "mamba_head_dim", "mamba_d_head", "mamba_headdim")
    state = _number(config, "ssm_state_size", "mamba_d_state")
    kernel = _number(config, "conv_kernel", "mamba_d_conv")
    conv = (heads * dim, groups * state, groups * state)
    return _Told(conv, kernel, (heads, dim, state), (groups,))


_KINDS: dict[str, Callable[[Any], _Told]] = {
    "short_conv": _short_convolution,
    "gdn_attn": _gated_delta_net,
    "mamba1": _mamba,
    "mamba2": _mamba2,
}
"""By vLLM's name of a kind of state. Those of linear attention are not among them."""


def _number(config: Any, *names: str) -> int:
    """Return the number that a config has under these names; 0 if it has none, or several."""
    found = {value for name in names if isinstance(value := getattr(config, name, None), int)}
    return found.pop() if len(found) == 1 else 0
