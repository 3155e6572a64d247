"""The description of a model that vLLM serves, and the checks that kvcore can serve it.

The connector's scheduler and workers derive the same description from the same configs. They
therefore agree on the canonical layer order, the block shape and the slots without a handshake. In
a pipeline both first learn of all stages (`kvcore_vllm.stages`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import gcd
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvcore.errors import UnsupportedError
from kvcore.model.points import PointShape, RowHeads, StateGroup, WindowGroup, over_stages
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore_vllm.context import check_context, context_parallel, page_tokens, ranks_of_stage
from kvcore_vllm.engine import verdict
from kvcore_vllm.identity import WITHOUT_DRAFT, draft_of, model_identity, packed_identity
from kvcore_vllm.packed import (
    PLAIN_QUANTISATION,
    all_latents,
    packed_pages,
    packed_windows,
    page_window,
    why_packed,
)
from kvcore_vllm.probes import STATES
from kvcore_vllm.shares import StateShares, state_shares
from kvcore_vllm.specs import first_specs, keeps_states, leaf_specs, state_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvcore.config import Config

_log = logging.getLogger("kvcore.vllm")

_SERVED_SPECS = frozenset(
    {FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MLAAttentionSpec}
)
"""Exact types: a subclass keeps something else in its pages (sinks, hidden states, a pool)."""

_SERVED_DRAFTS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose draft model keeps KV of every token, as a layer of the model does."""

_DRAFT_PREFIXES = ("draft_model.", "mtp.")
"""Begin the names of the layers of a draft model that counts its layers from 0."""

_Place = tuple[bool, int, str]
"""Whether a layer is one of a draft model, its number, and its name."""


def describe(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_tokens: int,
    dense_windows: str = "",
    stages: Sequence[Collection[str]] = (),
) -> ModelDescription:
    """Return the description of the model. Raises UnsupportedError if kvcore cannot serve it.

    ``block_tokens`` is the size wanted of a block. A model with states gets its largest divisor
    with which blocks end where vLLM has states to save. ``dense_windows`` is why blocks keep the
    KV of layers with windows too. If it is empty, resume points keep the ends of the windows.
    ``stages`` are the names of the layers of each pipeline stage, of which ``kv_cache_config`` has
    all; empty for one stage.
    """
    _check_parallelism(vllm_config, len(stages))
    check_context(vllm_config, kv_cache_config)
    _check_speculation(vllm_config)
    states = state_specs(kv_cache_config)
    windows, dense = _window_groups(kv_cache_config, dense_windows, stages)
    step = 0
    if states:
        _check_states(states)
        step = _boundary_step(vllm_config, kv_cache_config)
        block_tokens = gcd(block_tokens, step)
    order = _layer_order(kv_cache_config, windows)
    if why := why_packed(vllm_config, kv_cache_config, order):
        return _describe_packed(
            vllm_config, kv_cache_config, block_tokens, dense_windows, stages, why, states, step
        )
    layers = _layers_of_stages(order, stages)
    groups = _groups(vllm_config, kv_cache_config, windows, order)
    specs = _served_specs(kv_cache_config, windows)
    if not states:
        _check_page_writers(kv_cache_config)
    elif any(_window_of(spec) for spec in specs):
        raise UnsupportedError(
            "states beside layers with windows whose KV is in blocks, of which vLLM drops pages "
            f"before it has states to save: kvcore keeps the ends of windows there, but {dense}"
        )
    spec = specs[0]
    tp = vllm_config.parallel_config.tensor_parallel_size
    mla = isinstance(spec, MLAAttentionSpec)
    total_heads = 1 if mla else vllm_config.model_config.get_total_num_kv_heads()
    window_specs = [first_specs(kv_cache_config)[index] for index in windows]
    shares = () if mla else state_shares(vllm_config, states)
    by_heads = (
        bool(states or windows)
        and len(shares) == len(states)
        and _heads_alike(vllm_config, [spec, *window_specs])
    )
    if (states or windows) and not by_heads:
        # Ranks with the same heads may have states, and heads of windows, of their own. So their
        # parts count apart. Points are read by as many ranks as wrote them.
        shares, total_heads = (), spec.num_kv_heads * tp
        if states:
            _log.info("states are not cut by KV heads: %d ranks read what %d wrote only", tp, tp)
    if max(total_heads // tp, 1) != spec.num_kv_heads:
        raise UnsupportedError(
            f"{spec.num_kv_heads} KV heads per rank with {total_heads} heads over {tp} ranks: "
            "kvcore expects heads split evenly over tensor-parallel ranks"
        )
    shape = BlockShape(
        layers=sum(len(group.layers) for group in groups),
        kv_heads=total_heads,
        head_dim=spec.head_size,
        v_head_dim=spec.head_size if mla else spec.head_size_v,
        kv_factor=1 if mla else 2,
        block_tokens=block_tokens,
        dtype=_dtype_of(spec),
    )
    seen = [
        _window_group(vllm_config, kv_cache_config, index, block_tokens, by_heads)
        for index in windows
    ]
    identity = model_identity(vllm_config, specs, states, seen, stages, shares=shares)
    plain = ModelDescription(
        shape,
        groups,
        identity.fingerprint,
        tp * max(len(stages), 1),
        stages=layers,
        alone=identity.alone,
    )
    if not states and not windows:
        return plain
    return _with_points(
        plain,
        PointShape(
            _state_groups(kv_cache_config, plain, shares),
            sum(_rows_of_stages(plain)),
            step // block_tokens if states else 1,
            tuple(seen),
            heads=RowHeads(spec.num_kv_heads, shape.head_nbytes) if shares else None,
        ),
        stages,
    )


def _rows_of_stages(model: ModelDescription) -> list[int]:
    """Return the bytes of a row on a rank of each stage."""
    return [
        model.rank_shape(rank).nbytes for rank in range(0, model.world_size, model.tensor_ranks)
    ]


def _with_points(
    model: ModelDescription, point: PointShape, stages: Sequence[Collection[str]]
) -> ModelDescription:
    """Return ``model`` with resume points, of which each stage keeps the part of its layers."""
    if not stages:
        return replace(model, point=point)
    whole, parts = over_stages(point, stages, _rows_of_stages(model))
    return replace(model, point=whole, stage_points=parts)


def _describe_packed(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_tokens: int,
    dense: str,
    stages: Sequence[Collection[str]],
    why: str,
    states: Sequence[MambaSpec],
    step: int,
) -> ModelDescription:
    """Return the description of a model whose pages are stored as they are, for the reason ``why``.

    A block is raised to a whole number of pages, also of layers with a window, whose last pages are
    kept by resume points, as are the ``states`` that vLLM has every ``step`` tokens. Raises
    UnsupportedError if kvcore cannot serve it, or if there are layers with a window and ``dense``
    says why there can be no points.
    """
    windows = packed_windows(kv_cache_config)
    order = _layer_order(kv_cache_config, windows)
    names = [name for *_, name in order]
    packed = packed_pages(vllm_config, kv_cache_config, names, why, windows)
    if windows and dense:
        raise UnsupportedError(f"{why} beside windows, which only resume points keep, and {dense}")
    spare = _spare(vllm_config, kv_cache_config)
    seen = [page_window(vllm_config, kv_cache_config, index, spare) for index in windows]
    specs, ranks = first_specs(kv_cache_config), ranks_of_stage(vllm_config)
    layers = _layers_of_stages(order, stages)
    identity = model_identity(
        vllm_config,
        [s for i, s in enumerate(specs) if i not in windows and type(s) is not MambaSpec],
        states,
        stages=stages,
        packed=packed_identity(vllm_config, kv_cache_config, packed, names, seen, stages),
    )
    block_tokens = packed.block_tokens(block_tokens, [window.page_tokens for window in seen])
    if step % block_tokens:
        raise UnsupportedError(
            f"{why} beside states: vLLM has these every {step} tokens, inside its pages, and a hit "
            f"ends behind blocks of {block_tokens} tokens, which are whole pages. Leave "
            "prefix_match_unit out, if it is set"
        )
    _log.info("blocks keep vLLM's pages of %d tokens as they are: %s", packed.page_tokens, why)
    alike = not states and all_latents(specs) and not context_parallel(vllm_config)
    shares = 1 if alike else ranks
    plain = ModelDescription(
        packed.shape(block_tokens, shares, layers),
        _groups(vllm_config, kv_cache_config, windows, order),
        identity.fingerprint,
        ranks * max(len(stages), 1),
        stages=layers,
        alone=identity.alone,
        packed=packed,
    )
    if not windows and not states:
        return plain
    point = PointShape(
        _state_groups(kv_cache_config, plain),
        sum(_rows_of_stages(plain)),
        max(step // block_tokens, 1),
        page_windows=tuple(seen),
    )
    return _with_points(plain, point, stages)


def _boundary_step(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the tokens between two boundaries at which vLLM can have states to save.

    vLLM calls it the hash block. It divides the pages of states, and may be smaller.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    _, step = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(step)


def dense_windows(config: Config) -> str:
    """Return why blocks keep the KV of layers with windows too; empty if resume points can do."""
    return 'vllm.windows is "dense"' if config.vllm.windows == "dense" else ""


def _window_groups(
    kv_cache_config: KVCacheConfig, dense: str, stages: Sequence[Collection[str]]
) -> tuple[tuple[int, ...], str]:
    """Return the groups whose layers have a window that resume points are to keep.

    If there are none, the text says why. It is so if every layer with KV has a window, because
    nothing is left then for blocks.
    """
    groups, specs = kv_cache_config.kv_cache_groups, first_specs(kv_cache_config)
    with_kv = [i for i, group in enumerate(groups) if not keeps_states(group)]
    found = [i for i in with_kv if type(specs[i]) is SlidingWindowSpec]
    others = [i for i in with_kv if i not in found]
    if not found or {type(specs[i]) for i in others} != {FullAttentionSpec}:
        return (), "only sliding ones beside full attention"
    largest = max(_token_nbytes(specs[i]) for i in found)
    nbytes = {name: _token_nbytes(specs[i]) for i in others for name in groups[i].layer_names}
    for own in stages or [nbytes]:
        most = sum(nbytes[name] for name in nbytes if name in own)
        if not dense and largest > most:
            of_stage = " of a pipeline stage" if stages else ""
            dense = (
                f"one of their layers keeps {largest} bytes a token, all others{of_stage} "
                f"together {most}"
            )
    kinds = {_type_of(specs[i]) for i in with_kv}
    if not dense and len(kinds) > 1:  # the namespace names one type and its scales
        dense = f"their KV is of another type: {sorted(kinds)}"
    if dense:
        _log.info("blocks keep the KV of %d groups of layers with windows: %s", len(found), dense)
        return (), dense
    return tuple(found), ""


def _type_of(spec: Any) -> tuple[str, str]:
    """Return the type of a layer's numbers, and how they are quantised."""
    return str(spec.dtype), str(spec.kv_quant_mode.name)


def _token_nbytes(spec: Any) -> int:
    """Return the bytes that a layer keeps of a token on one rank."""
    width = spec.head_size + getattr(spec, "head_size_v", spec.head_size)
    return int(spec.num_kv_heads * width * spec.dtype.itemsize)


def _window_group(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    index: int,
    block_tokens: int,
    by_heads: bool,
) -> WindowGroup:
    """Return what a resume point has of a group of layers with a window."""
    group = kv_cache_config.kv_cache_groups[index]
    spec, names = leaf_specs(group)[0], tuple(sorted(group.layer_names, key=_order))
    assert isinstance(spec, SlidingWindowSpec)
    shape = BlockShape(
        layers=1,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        v_head_dim=spec.head_size_v,
        block_tokens=block_tokens,
        dtype=_dtype_of(spec),
    )
    spare = _spare(vllm_config, kv_cache_config)
    return WindowGroup(index, names, shape, spec.sliding_window - 1, spare, by_heads)


_HEADS = re.compile("(kv|key_value)_heads")
"""Begins or is within the names of a config's numbers of KV heads."""


def _heads_alike(vllm_config: VllmConfig, specs: Sequence[Any]) -> bool:
    """Return True if layers of ``specs`` have the same KV heads on each rank, at any size.

    A rank is told how many heads it has, not which. So the config must name one number of them:
    with two, ranks that share a head of one layer may have heads of their own in another.
    """
    kinds = {(s.num_kv_heads, s.head_size, s.head_size_v) for s in specs}
    model = vllm_config.model_config
    named = [n for name, n in model.hf_text_config.to_dict().items() if _HEADS.search(name)]
    total = model.get_total_num_kv_heads()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    alike = all(n in (None, total) for n in named) and len(kinds) == 1
    return alike and max(total // ranks, 1) == specs[0].num_kv_heads


def _spare(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return how many tokens before a boundary the model goes on at most.

    A hit of a whole prompt goes on at its last token, and a draft model some tokens before. States
    are of one token.
    """
    return 0 if state_specs(kv_cache_config) else max(lookahead(vllm_config), 1)


def _state_groups(
    kv_cache_config: KVCacheConfig, model: ModelDescription, shares: Sequence[StateShares] = ()
) -> tuple[StateGroup, ...]:
    """Return what a resume point has of each group of states, which ``shares`` cut, if any."""
    groups = kv_cache_config.kv_cache_groups
    found = [
        StateGroup(
            group.index,
            tuple(groups[group.index].layer_names),
            leaf_specs(groups[group.index])[0].state_content_size_bytes,
        )
        for group in model.groups
        if group.of == "states"
    ]
    if shares:
        found = [replace(g, sections=s.sections) for g, s in zip(found, shares, strict=True)]
    return tuple(found)


def _check_states(states: Sequence[MambaSpec]) -> None:
    """Raise UnsupportedError unless vLLM tells when a page has the state of a boundary."""
    verdict().holds(STATES)
    modes = sorted({spec.mamba_cache_mode for spec in states})
    if modes != ["align"]:
        raise UnsupportedError(
            f"states of layers with mamba_cache_mode={' and '.join(modes)}; kvcore serves 'align', "
            "vLLM's default with prefix caching (--enable-prefix-caching), and its only such mode "
            "from 0.32 on"
        )


def _check_parallelism(vllm_config: VllmConfig, stages: int) -> None:
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size != max(stages, 1):
        raise UnsupportedError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}, and the layers of {stages} "
            "stages: kvcore serves stages of which it knows all"
        )


def _check_speculation(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError if a draft model keeps anything but KV of layers like the model's."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in WITHOUT_DRAFT:
        return
    draft = draft_of(vllm_config)
    if speculative.method not in _SERVED_DRAFTS or draft is None:
        raise UnsupportedError(
            f"speculative decoding by {speculative.method!r}; kvcore serves "
            f"{', '.join(map(repr, _SERVED_DRAFTS + WITHOUT_DRAFT))}"
        )
    if getattr(speculative, "parallel_drafting", False):
        raise UnsupportedError(
            "parallel_drafting, which nobody has tried with kvcore: set it to False"
        )
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedError(
            f"a draft model with pipeline_parallel_size={parallel.pipeline_parallel_size}: its "
            "layers are on the last stage only; use 1, or draft by 'ngram'"
        )
    told = speculative.draft_parallel_config.tensor_parallel_size
    if told != parallel.tensor_parallel_size:
        raise UnsupportedError(
            f"draft_tensor_parallel_size={told} with "
            f"tensor_parallel_size={parallel.tensor_parallel_size}: kvcore serves equal ones"
        )


def lookahead(vllm_config: VllmConfig) -> int:
    """Return how many tokens after a position shape the draft model's KV of that position.

    EAGLE and MTP draft from the model's state at a position *and* the token after it, which is not
    part of a block's key. A draft model of its own sees what the model sees.
    """
    draft, speculative = draft_of(vllm_config), vllm_config.speculative_config
    if draft is None or speculative is None or not speculative.use_eagle():
        return 0
    return int(getattr(draft.hf_config, "n_predict", None) or 1)


def _check_page_writers(kv_cache_config: KVCacheConfig) -> None:
    """Raise UnsupportedError if vLLM zeroes pages, or copies others into them, within a step.

    It does so only for models that need zeroing. Model Runner V1 queues it after it has called the
    connector, so a load to such a page may come before. V2 queues it before that call, so a save
    may still read the page.
    """
    if kv_cache_config.needs_kv_cache_zeroing:
        raise UnsupportedError(
            "a KV cache whose pages vLLM zeroes or copies within a step (layers of several "
            "precisions), in no order with the copies of a connector; kvcore serves caches of one "
            "precision"
        )


def _layers_of_stages(
    order: Sequence[_Place], stages: Sequence[Collection[str]]
) -> tuple[tuple[int, int], ...]:
    """Return the layers of blocks [start, stop) of each pipeline stage; empty for one stage.

    Raises UnsupportedError unless stages divide the layers of blocks in their order, some to each.
    """
    of = {name: stage for stage, names in enumerate(stages) for name in names}
    held = [of[name] for *_, name in order if stages]
    counts = [held.count(stage) for stage in range(len(stages))]
    if held != sorted(held) or 0 in counts:
        raise UnsupportedError(
            f"pipeline_parallel_size={len(stages)} with {counts} layers on its stages whose KV is "
            "kept in blocks: kvcore serves stages that each have some, in order. Use fewer stages, "
            "or tensor parallelism"
        )
    return tuple(pairwise(accumulate(counts, initial=0)))


def _dtype_of(spec: AttentionSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")


def _order(name: str) -> _Place:
    """Order the layers of a model. A draft model counts its layers on, or anew from 0."""
    from vllm.model_executor.models.utils import extract_layer_index

    return name.startswith(_DRAFT_PREFIXES), extract_layer_index(name), name


def _layer_order(kv_cache_config: KVCacheConfig, windows: Sequence[int]) -> list[_Place]:
    """Return the layers of blocks in order. Raises UnsupportedError for groups of another use."""
    found: list[str] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        _check_group(group)
        if not keeps_states(group) and index not in windows:
            found += group.layer_names
    return sorted(map(_order, found))


def _groups(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    windows: Sequence[int],
    order: Sequence[_Place],
) -> tuple[LayerGroup, ...]:
    """Return vLLM's groups; those of ``windows`` have no layers of blocks."""
    canonical = {name: i for i, (*_, name) in enumerate(order)}
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        tokens = page_tokens(vllm_config, group.kv_cache_spec)
        if keeps_states(group):
            groups.append(LayerGroup(index, tokens, (), of="states"))
            continue
        if index in windows:
            groups.append(LayerGroup(index, tokens, (), of="windows"))
            continue
        names = tuple(sorted(group.layer_names, key=canonical.__getitem__))
        layers = tuple(canonical[name] for name in names)
        groups.append(LayerGroup(index, tokens, layers, names))
    return tuple(groups)


def _check_group(group: Any) -> None:
    """Raise UnsupportedError if a cache group is not the KV of the model's own layers."""
    if not group.enable_kv_transfer:
        raise UnsupportedError("a cache group that vLLM rebuilds instead of loading it")
    if getattr(group, "host_resident", False):
        raise UnsupportedError("a cache group that vLLM keeps in host memory (host_resident)")
    role = getattr(group, "role", "default")
    if (name := str(getattr(role, "value", role))) != "default":
        raise UnsupportedError(f"a cache group of role {name!r}: kvcore serves the role 'default'")


def _served_specs(
    kv_cache_config: KVCacheConfig, windows: Sequence[int] = ()
) -> list[AttentionSpec]:
    """Return the specs of all layers of blocks, which differ in the window only.

    Raises UnsupportedError if their specs differ, or if kvcore does not serve one, or one of the
    groups ``windows``, which are no layers of blocks.
    """
    specs: list[AttentionSpec] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        found = [spec for spec in leaf_specs(group) if type(spec) is not MambaSpec]
        for spec in found:
            _check_spec(spec)
        specs += found if index not in windows else []
    if not specs:
        raise UnsupportedError(
            "a model without attention: kvcore serves states beside the KV of other layers"
        )
    kinds = {
        (
            isinstance(s, MLAAttentionSpec), s.num_kv_heads, s.head_size, s.head_size_v, s.dtype,
            s.kv_quant_mode.name,
        )
        for s in specs
    }  # fmt: skip
    if len(kinds) > 1:
        raise UnsupportedError(f"layers with different heads or dtypes: {sorted(map(str, kinds))}")
    return specs


def _check_spec(spec: Any) -> None:
    """Raise UnsupportedError unless a layer's pages hold the plain K and V of its tokens."""
    kind = type(spec).__name__
    if type(spec) not in _SERVED_SPECS:
        raise UnsupportedError(
            f"a cache of type {kind}: kvcore serves full, sliding-window, chunked-local and "
            "multi-head latent attention"
        )
    if spec.state_content_bytes is not None or spec.tokens_per_state != 1:
        raise UnsupportedError(f"{kind} with packed or compressed states")
    if spec.page_size_padded not in (None, spec.unpadded_page_size_bytes):
        raise UnsupportedError(f"{kind} with padded pages")
    mode = spec.kv_quant_mode.name
    if mode not in PLAIN_QUANTISATION:
        raise UnsupportedError(
            f"KV quantisation {mode} beside states or windows: kvcore serves "
            f"{' and '.join(PLAIN_QUANTISATION)} there"
        )
    if mode == "NONE" and spec.dtype.itemsize == 1:
        raise UnsupportedError(f"KV of {spec.dtype} whose numbers have no known format")


def _window_of(spec: Any) -> int:
    """Return the tokens of a layer's window; 0 if it looks at all tokens."""
    found = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return int(found or 0)
