"""Shares of states: those of a KV head are the same numbers at any size, as vLLM divides them."""

from __future__ import annotations

from itertools import accumulate, chain, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kinds
from vllm.v1.kv_cache_interface import MambaSpec

from kvcore_vllm.shares import StateShares, state_shares

HEADS = 4
CONFIGS: dict[str, dict[str, Any]] = {
    "short_conv": {"conv_dim": 48, "conv_L_cache": 3},
    "gdn_attn": {
        "linear_num_key_heads": 4, "linear_key_head_dim": 6, "linear_num_value_heads": 8,
        "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4,
    },
    "mamba2": {
        "mamba_n_heads": 8, "mamba_d_head": 3, "mamba_n_groups": 4, "mamba_d_state": 7,
        "mamba_d_conv": 4,
    },
    "mamba1": {"mamba_expand": 2, "hidden_size": 24, "mamba_d_state": 7, "mamba_d_conv": 4},
}  # fmt: skip
SECTIONS = {
    "short_conv": (48,), "gdn_attn": (24, 24, 40), "mamba2": (24, 28, 28), "mamba1": (48,)
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", CONFIGS)


def shapes_of(kind: str, ranks: int, spec: int = 0, **fields: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of a state on a rank, by vLLM's own calculator."""
    c = SimpleNamespace(**CONFIGS[kind] | fields)
    if kind == "short_conv":
        return Shapes.short_conv_state_shape(ranks, c.conv_dim, c.conv_L_cache, spec)
    if kind == "gdn_attn":
        return Shapes.gated_delta_net_state_shape(
            ranks, c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim,
            c.linear_value_head_dim, c.linear_conv_kernel_dim, spec,
        )  # fmt: skip
    if kind == "mamba1":
        return Shapes.mamba1_state_shape(
            ranks, c.mamba_expand * c.hidden_size, c.mamba_d_state, c.mamba_d_conv
        )
    return Shapes.mamba2_state_shape(
        ranks, c.mamba_n_heads * c.mamba_d_head, c.mamba_n_groups, c.mamba_n_heads, c.mamba_d_head,
        c.mamba_d_state, c.mamba_d_conv, spec,
    )  # fmt: skip


def spec_of(kind: str, shapes: tuple[tuple[int, ...], ...], **fields: Any) -> MambaSpec:
    types = (torch.bfloat16, *[torch.float32] * (len(shapes) - 1))
    given = {"block_size": 16, "shapes": shapes, "dtypes": types, "mamba_type": Kinds[kind.upper()]}
    return MambaSpec(**given | fields)


def shares(
    kind: str, ranks: int, spec: MambaSpec | None = None, heads: int = HEADS, **fields: Any
) -> tuple[StateShares, ...]:
    made = spec or spec_of(kind, shapes_of(kind, ranks, **fields))
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: heads,
            hf_text_config=SimpleNamespace(**CONFIGS[kind] | fields),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    return state_shares(config, [made])


@every_kind
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_share_of_a_head_is_the_same_at_any_number_of_ranks(
    kind: str, layout: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)
    [one], [found] = shares(kind, 1), shares(kind, ranks)
    assert (found.share, found.shapes) == (one.share, one.shapes)
    assert found.heads == HEADS // ranks
    assert one.shapes == shapes_of(kind, 1)
    assert sum(found.sections) == spec_of(kind, shapes_of(kind, ranks)).state_content_size_bytes


@every_kind
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_a_head_has_the_channels_that_vllm_gives_its_rank(
    kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's loader of weights divides numbered channels among ranks."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)
    taps = min(shapes_of(kind, 1)[0])
    item = 2 if layout == "SD" else 2 * taps
    whole = torch.arange(sum(SECTIONS[kind]))
    found: dict[int, dict[int, list[int]]] = {}
    for ranks in (1, 2, 4):
        [cut] = shares(kind, ranks)
        settings = [(size, 0, False) for size in SECTIONS[kind]]
        for rank in range(ranks):
            own = torch.empty(len(whole) // ranks, dtype=torch.int64)
            loader = mamba_v2_sharded_weight_loader(settings, ranks, rank)  # type: ignore[arg-type]
            loader(torch.nn.Parameter(own, requires_grad=False), whole)
            sizes = [nbytes // item for nbytes in cut.sections[: len(settings)]]
            borders = list(pairwise(accumulate(sizes, initial=0)))
            for head in range(cut.heads):
                each = [own[a:b].chunk(cut.heads)[head] for a, b in borders]
                channels = torch.cat(each).tolist()
                found.setdefault(ranks, {})[rank * cut.heads + head] = channels
    assert found[1] == found[2] == found[4]
    assert sorted(chain(*found[1].values())) == whole.tolist()


def test_shares_by_hand() -> None:
    """q and k of one head of six, v of two heads of five, each in two bytes; then two matrices."""
    [cut] = shares("gdn_attn", 2)
    assert cut.share == (12, 12, 20) * 3 + (2 * 5 * 6 * 4,)
    assert cut.sections == tuple(2 * nbytes for nbytes in cut.share)
    assert cut.shapes == ((3, 88), (8, 5, 6))


@every_kind
def test_states_that_are_not_as_the_config_says_are_not_cut(kind: str) -> None:
    right = shapes_of(kind, 2)
    (rows, dims), *rest = right
    wrong = [
        ((rows + 1, dims), *rest),
        ((rows, dims + 2), *rest),
        ((rows, 2 * dims), *rest),
        (*right, (2, 3)),  # as the rings of ReplaySSM are
        right[:1] if rest else (*right, (2, 5)),
    ]
    assert shares(kind, 2, spec_of(kind, right))
    for shapes in wrong:
        assert shares(kind, 2, spec_of(kind, shapes)) == ()
    name = next(iter(CONFIGS[kind]))
    assert shares(kind, 2, spec_of(kind, right), **{name: 2 * CONFIGS[kind][name]}) == ()
    assert shares(kind, 2, spec_of(kind, right), **{name: None}) == ()
    assert shares(kind, 2, spec_of(kind, right, tp_replicated=True)) == ()
    assert shares(kind, 2, spec_of("linear", right)) == ()


@every_kind
def test_states_are_not_cut_finer_than_heads_and_groups_of_the_model(kind: str) -> None:
    assert shares(kind, 1, heads=1) == (), "nothing to share among ranks"
    assert shares(kind, 4, heads=2) == (), "ranks with the same KV head have other states"
    assert shares(kind, 1, heads=3) == () or kind in ("short_conv", "mamba1")
    assert shares(kind, 1, heads=5) == ()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_of_which_ranks_have_copies_are_not_cut(ranks: int) -> None:
    """With one group, two ranks have its B and C both, and vLLM's shapes show it as two."""
    for groups in (1, 2):
        if groups == 1 or not groups % ranks:
            assert shares("mamba2", ranks, mamba_n_groups=groups) == ()
    assert shares("mamba2", ranks)


def test_rows_that_cannot_be_told_from_channels_are_not_cut() -> None:
    assert shares("short_conv", 2, conv_dim=8, conv_L_cache=4)
    assert shares("short_conv", 2, conv_dim=8, conv_L_cache=5) == ()


def test_steps_with_drafts_add_rows_which_are_not_cut() -> None:
    shapes = shapes_of("gdn_attn", 2, spec=2)
    assert shares("gdn_attn", 2, spec_of("gdn_attn", shapes)) == ()
