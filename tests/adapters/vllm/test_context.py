"""Context parallelism: which tokens a page stands for, and which of them a rank has."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.request import Request

from kvcore.connector.page_table import unit_table
from kvcore.model.spec import LayerGroup
from kvcore.transfer.graph import SKIP
from kvcore_vllm.connector import KVCoreConnector
from kvcore_vllm.context import context_sizes, page_tokens, ranks_of_stage

PLUGIN = Path(__file__).parents[2] / "engines" / "context" / "kvcore_context.py"
NO_PAGE = 0
"""The page that vLLM gives to nobody."""


def plugin() -> ModuleType:
    """Return the emulation of the engine tests, which says where vLLM keeps a token."""
    spec = importlib.util.spec_from_file_location("kvcore_context", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


place = plugin().place


def config(decode: int = 1, prefill: int = 1, interleave: int = 1, older: int = 1) -> Any:
    parallel = SimpleNamespace(
        tensor_parallel_size=decode,
        decode_context_parallel_size=decode,
        prefill_context_parallel_size=prefill,
        cp_kv_cache_interleave_size=interleave,
        dcp_kv_cache_interleave_size=older,
    )
    return SimpleNamespace(parallel_config=parallel)


def full(size: int = 16, **more: Any) -> Any:
    return FullAttentionSpec(
        block_size=size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, **more
    )


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw the tokens that a page has room for on a rank, the ranks, and the interleave."""
    interleave = draw(st.sampled_from([1, 2, 4, 8]))
    return interleave * draw(st.integers(1, 4)), draw(st.integers(1, 5)), interleave


@given(sizes(), st.integers(0, 300))
def test_a_rank_has_as_many_of_the_first_tokens_as_vllm_says(
    found: tuple[int, int, int], tokens: int
) -> None:
    size, ranks, interleave = found
    pages, rank, slots = place(np.arange(tokens), size, ranks, interleave)
    told = get_dcp_local_seq_lens(torch.tensor([tokens]), ranks, None, interleave)[0].tolist()
    assert np.bincount(rank, minlength=ranks).tolist() == told
    assert len({*zip(pages, rank, slots, strict=True)}) == tokens
    assert not tokens or slots.max() < size


@given(st.data(), sizes(), st.integers(1, 3), st.integers(1, 200))
def test_blocks_bring_every_token_back_on_every_rank(
    data: st.DataObject, found: tuple[int, int, int], pages_of_a_block: int, tokens: int
) -> None:
    """What is copied by rank, block by block, into other pages is all that attention reads."""
    size, ranks, interleave = found
    page = page_tokens(config(ranks), full(size))
    block = page * pages_of_a_block
    group = LayerGroup(0, page, (0,), ("a",))
    room = -(-tokens // (size * ranks))  # as vLLM allocates, see below
    tables = data.draw(st.permutations(range(1, 2 * room + 1)))
    saved, loaded = tables[:room], tables[room:]
    memory = np.full((ranks, 2 * room + 1, size), -1)
    at = place(np.arange(tokens), size, ranks, interleave)
    memory[at[1], np.array(saved)[at[0]], at[2]] = np.arange(tokens)
    before = memory.copy()

    blocks = tokens // block
    first, second = (
        unit_table(group, table, block, 0, blocks, no_page=NO_PAGE).array().ravel()
        for table in (saved, loaded)
    )
    assert SKIP not in {*first, *second}
    for rank in range(ranks):
        memory[rank, second] = memory[rank, first]

    back = place(np.arange(blocks * block), size, ranks, interleave)
    assert (memory[back[1], np.array(loaded)[back[0]], back[2]] == np.arange(blocks * block)).all()
    untouched = [p for p in range(len(memory[0])) if p not in {*second}]
    assert (memory[:, untouched] == before[:, untouched]).all()


@pytest.mark.parametrize("kind", ["heads", "latents", "replicated"])
@pytest.mark.parametrize("decode", [1, 2, 4])
def test_vllm_gives_as_many_pages_as_kvcore_counts(kind: str, decode: int) -> None:
    """vLLM's own manager allocates for requests of every length around the borders of pages."""
    told = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    spec: Any = {
        "heads": full(),
        "latents": MLAAttentionSpec(**told),  # type: ignore[arg-type]
        "replicated": full(dcp_sharded=False),
    }[kind]
    size = page_tokens(config(decode), spec)
    assert size == 16 * (1 if kind == "replicated" else decode)
    groups = [KVCacheGroupSpec(["a"], spec)]
    made = KVCacheManager(
        KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=512,
        scheduler_block_size=size,
        hash_block_size=size,
        enable_caching=False,
        dcp_world_size=decode,
    )
    for tokens in (1, size - 1, size, size + 1, 3 * size, 3 * size + 1):
        request = Request(f"r{tokens}", [1] * tokens, SamplingParams(max_tokens=1), None)
        given_ = made.allocate_slots(request, tokens)
        assert given_ is not None
        assert len(given_.get_block_ids()[0]) == -(-tokens // size)
        made.free(request)


def test_the_numbers_that_say_what_a_rank_has() -> None:
    assert context_sizes(config()) is None
    told = [
        context_sizes(config(**given_))  # type: ignore[arg-type]
        for given_ in (
            {"decode": 2},
            {"decode": 4},
            {"prefill": 2},
            {"decode": 2, "prefill": 2},
            {"decode": 2, "interleave": 4},
            {"decode": 2, "older": 8},
        )
    ]
    assert len({str(one) for one in told}) == len(told)
    assert told[-1] == {"decode": 2, "prefill": 1, "interleave": 8}
    assert ranks_of_stage(config(4, 2)) == 8
    assert page_tokens(config(prefill=2), full()) == 16  # each rank has all of them


def test_pages_that_the_step_was_promised_are_those_of_the_tokens() -> None:
    made = KVCoreConnector.__new__(KVCoreConnector)
    made._vllm_config, made._pages, made._waiting = config(2), [], []
    made._kv_cache_config = SimpleNamespace(  # type: ignore[assignment]
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=full())]
    )
    pages: Sequence[list[int]] = [[5, 6, 7, 8]]
    blocks: Any = SimpleNamespace(get_block_ids=lambda: pages)
    made._promise(SimpleNamespace(request_id="r"), blocks, range(32, 65), in_step=True)  # type: ignore[arg-type]
    assert made._pages == [6, 7]
