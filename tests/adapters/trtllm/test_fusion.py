"""Fusion on TensorRT-LLM's connector, in its harness: what the conformance cases do not ask."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

import kvcore_trtllm.testing.conformance as trtllm  # after the skip
from kvcore.errors import ConfigError, TransferError, UnsupportedError
from kvcore.fusion.decoder import HiddenState
from kvcore.fusion.fusor import BlendJob, BlendOutcome, Fusor
from kvcore.fusion.options import FusionOptions
from kvcore.harness.models import tiny_model
from kvcore.memory.copy.reference import _plane_view
from kvcore.memory.layout import KVView, trtllm_layout
from kvcore.model.shape import BlockShape
from kvcore.testing.conformance import Ask, Engine, Kit
from kvcore.testing.conformance.cases.fusion import FUSED, Mixed, chunks_of, mixed
from kvcore.transfer.graph import Path as Direction
from kvcore.transfer.graph import RowError
from kvcore.worker import worker as kvcore_worker
from kvcore_trtllm import engine as engine_names
from kvcore_trtllm.describe import ModelFacts
from kvcore_trtllm.fusion import TrtllmLayers, ropes_of
from kvcore_trtllm.salt import PREFIX, fusion_salt, read_salt
from kvcore_trtllm.testing import HarnessArgs, Limits, installed, modules
from support import trtllm_parts
from support.identity import plain

pytestmark = pytest.mark.slow  # a model runs in the harness


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with Kit(trtllm.driver(), tmp_path, model=tiny_model("llama")) as made:
        yield made


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What kvcore's log says, on whatever thread."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    listener = Listener()
    logging.getLogger("kvcore").addHandler(listener)
    yield lines
    logging.getLogger("kvcore").removeHandler(listener)


def stored(kit: Kit, engine: Engine, seed: int) -> list[Mixed]:
    """Prompts of chunks that are held."""
    chunks = chunks_of(kit, seed)
    kit.stored(engine, [Ask(chunk, 1) for chunk in chunks])
    return mixed(kit, chunks, seed + 100)


def blended(answers: Any) -> list[int]:
    return [answer.reused.get("blend", 0) for answer in answers]


# --- ratio 1 is a full prefill ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "overlap", "setup"),
    [
        ("HND", False, {}),
        ("HND", True, {"step_tokens": 64}),
        ("NHD", False, {"ranks": 2}),
    ],
    ids=["the kernel's rope", "chunked, overlapped", "two ranks, the module's rope"],
)
def test_everything_recomputed(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, order: str, overlap: bool, setup: dict[str, Any]
) -> None:
    monkeypatch.setattr(trtllm, "HarnessArgs", functools.partial(HarnessArgs, order=order))
    monkeypatch.setattr(trtllm, "Limits", functools.partial(Limits, overlap=overlap))
    with kit.fresh(kit.config(fusion=FUSED), **setup) as engine:
        prompts = stored(kit, engine, 100)[:3]
        beside = Ask(kit.tokens(99, 70), 12)
        asks = [*(prompt.ask(1.0) for prompt in prompts), beside]
        got = engine.ask(asks)
        kit.assert_same(got, asks)
        assert min(blended(got[:3])) >= 192, blended(got)
        engine.settle()
        engine.check()


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_other_models(tmp_path: Path, arch: str) -> None:
    """With biases; with norms of q and k, whose module rotates itself."""
    with (
        Kit(trtllm.driver(), tmp_path, model=tiny_model(arch)) as kit,
        kit.engine(kit.config(fusion=FUSED)) as engine,
    ):
        asks = [prompt.ask(1.0) for prompt in stored(kit, engine, 150)[:2]]
        got = engine.ask(asks)
        kit.assert_same(got, asks)
        assert min(blended(got)) >= 192


def test_chunks_on_disk_come_before_the_answer(kit: Kit) -> None:
    """A restarted engine finds marked chunks on disk, and the exact prefix before them."""
    config = kit.config(fusion=FUSED, disk=kit.disk())
    lead = kit.tokens(7, 64)
    with kit.fresh(config) as engine:
        [prompt, *_] = stored(kit, engine, 200)
        prompt = Mixed([*lead, *prompt.tokens], [(a + 64, b + 64) for a, b in prompt.spans])
        kit.stored(engine, [Ask(lead, 1)])
    with kit.fresh(config) as engine:
        got = engine.ask([prompt.ask(1.0)])
        kit.assert_same(got, [prompt.ask(1.0)])
        assert got[0].reused["disk"] == 64, "by the tier that held it"
        assert got[0].reused["blend"] >= 192


# --- approximate stays apart ------------------------------------------------------------------


def test_nothing_from_the_first_chunk_on_is_kept(kit: Kit) -> None:
    with kit.engine(kit.config(fusion=FUSED)) as engine:
        [prompt, *_] = stored(kit, engine, 300)
        manager = engine._leader.manager  # type: ignore[attr-defined]
        before = manager.index.num_used("host")
        engine.ask([Ask(prompt.tokens, 40, fusion={"ratio": 0.2, "chunks": prompt.spans})])
        engine.settle()
        # What stands before the first chunk is shorter than a block: nothing was exact.
        assert prompt.spans[0][0] < 16
        added = manager.index.num_used("host") - before
        filler = 0  # `settle` asks for a prompt of three tokens
        assert added == filler, f"{added} blocks of a blended request were stored"


def test_a_salt_used_twice_is_not_kept_either(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under it the engine gives back what may be a blend's: nothing is made of that."""
    once = fusion_salt(ratio=0.2)
    monkeypatch.setattr(trtllm, "fusion_salt", lambda *args, **named: once)
    with kit.engine(kit.config(fusion=FUSED)) as engine:
        [prompt, *_] = stored(kit, engine, 400)
        ask = Ask(prompt.tokens, fusion={})
        [first] = engine.ask([ask])
        [second] = engine.ask([ask])
        assert first.reused["blend"] >= 192
        assert not second.reused
        assert second.tokens == first.tokens  # the engine's own cache, under that salt
        engine.settle()
        engine.forget()
        exact = Ask(prompt.tokens)
        kit.assert_same(engine.ask([exact]), [exact])


def test_tenants_have_chunks_of_their_own(kit: Kit) -> None:
    with kit.engine(kit.config(fusion=FUSED)) as engine:
        chunks = chunks_of(kit, 500)
        for chunk in chunks:
            engine.ask([Ask(chunk, 1, salt="a")])
        engine.settle()
        [prompt, *_] = mixed(kit, chunks, 600)
        for salt, found in (("b", False), (None, False), ("a", True)):
            wish = {"ratio": 1.0, "chunks": prompt.spans}
            got = engine.ask([Ask(prompt.tokens, salt=salt, fusion=wish)])
            kit.assert_same(got, [Ask(prompt.tokens)])
            assert bool(blended(got)[0]) == found, salt


def test_a_wish_without_sense_is_answered_exactly(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(trtllm, "fusion_salt", lambda *args, **named: PREFIX + '{"ratio": 2}')
    with kit.engine(kit.config(fusion=FUSED, log={"level": "warning"})) as engine:
        [prompt, *_] = stored(kit, engine, 700)
        got = engine.ask([Ask(prompt.tokens, fusion={})])
        kit.assert_same(got, [Ask(prompt.tokens)])
        assert not got[0].reused
    assert any("answered without fusion" in line for line in said)


# --- what fails is computed -------------------------------------------------------------------


@pytest.fixture
def losing_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs whose copies of chunks fail while this list is not empty."""
    failing: list[int] = []
    run = kvcore_worker.DeviceCopy.run

    def lossy(self: Any, graph: Any, op: Any, rows: list[int]) -> Any:
        if failing and op.path is Direction.H2D and graph.units[0].unit_tokens == 1:
            return dict.fromkeys(rows, RowError.INTERNAL)
        return run(self, graph, op, rows)

    monkeypatch.setattr(kvcore_worker.DeviceCopy, "run", lossy)
    return failing


@pytest.mark.parametrize("ranks", [1, 2])
def test_chunks_that_do_not_come_are_computed(
    kit: Kit, losing_chunks: list[int], ranks: int
) -> None:
    """The prefix was promised and nobody can take that back."""
    with kit.fresh(kit.config(fusion=FUSED), ranks=ranks) as engine:
        [prompt, *_] = stored(kit, engine, 800)
        losing_chunks.append(1)
        got = engine.ask([prompt.ask(0.2)])
        losing_chunks.clear()
        kit.assert_same(got, [prompt.ask(0.2)])
        assert engine.counted("kvcore_blends_total", outcome="failed") == 1
        engine.settle()
        engine.check()


def test_a_blend_that_raises_is_computed_and_then_no_more_are_made(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    blend = Fusor.blend

    def broken(self: Fusor, job: BlendJob, *rest: Any) -> BlendOutcome:
        if len(job.chunks):
            raise ValueError("told to fail")
        return blend(self, job, *rest)

    monkeypatch.setattr(Fusor, "blend", broken)
    with kit.engine(kit.config(fusion=FUSED)) as engine:
        asks = [prompt.ask(0.2) for prompt in stored(kit, engine, 900)[:4]]
        got = [engine.ask([ask])[0] for ask in asks]
        kit.assert_same(got, asks)
        assert engine.counted("kvcore_blends_total", outcome="failed") == 3
        assert not got[3].reused


def test_layers_that_cannot_be_run_fail_the_step(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is answered, never a wrong token; the engine turns the exception into that."""

    def broken(self: Any, *args: Any) -> None:
        raise ValueError("told to fail")

    with kit.fresh(kit.config(fusion=FUSED)) as engine:
        [prompt, *_] = stored(kit, engine, 1000)
        monkeypatch.setattr(Fusor, "blend", broken)
        with pytest.raises(TransferError, match="neither blended nor computed"):
            engine.ask([prompt.ask(0.2)])


# --- what does not fit is declined ------------------------------------------------------------


def test_layers_of_another_version_leave_exact_prefixes(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    forward = modules.DecoderLayer.forward

    def other(self: Any, hidden_states: Any, position_ids: Any, **rest: Any) -> Any:
        return forward(self, position_ids, hidden_states, **rest)

    monkeypatch.setattr(modules.DecoderLayer, "forward", other)
    config = kit.config(fusion=FUSED, log={"level": "warning"})
    with kit.fresh(config, ranks=2) as engine:
        [prompt, *_] = stored(kit, engine, 1100)
        got = engine.ask([prompt.ask(0.2)])
        kit.assert_same(got, [prompt.ask(0.2)])
        assert not blended(got)[0]
        kit.stored(engine, [Ask(prompt.tokens)])
        assert engine.ask([Ask(prompt.tokens)])[0].reused["host"] > 192
    [reason] = {line for line in said if "exact prefixes only" in line}
    assert "takes hidden_states, position_ids" in reason


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 8,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def facts(**changes: Any) -> ModelFacts:
    config = {**CONFIG, **changes.pop("config", {})}
    shape = {"layers": 2, "kv_heads": 1, "kv_dtype": "bfloat16"}
    return trtllm_parts.facts(**{**shape, "config": config, **changes})


def test_a_llama_is_served() -> None:
    assert len(ropes_of(SimpleNamespace(), facts())) == 2


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"config": {"architectures": ["MixtralForCausalLM"]}}, {}, "Mixtral"),
        ({"kv_factor": 1}, {}, "latent"),
        ({"kv_dtype": "float8_e4m3fn"}, {}, "float8_e4m3fn"),
        ({"identity": plain(quantization=["trtllm", "FP8"])}, {}, "quantised weights"),
        ({}, {"torch_compile_config": object()}, "torch_compile_config"),
        ({}, {"sparse_attention_config": object()}, "sparse_attention_config"),
        (
            {"config": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1, "factor": 2}}},
            {},
            "dynamic",
        ),
    ],
)
def test_what_cannot_be_right_is_named(
    changes: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=named):
        ropes_of(SimpleNamespace(**options), facts(**changes))


def test_the_model_is_found_by_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed("1.3"):
        mine, others = SimpleNamespace(), SimpleNamespace()
        made = [
            modules.PyTorchModelEngine(args, SimpleNamespace(rank=rank), object(), draft)
            for args in (mine, others)
            for rank in (0, 1)
            for draft in (False, True)
        ]
        assert engine_names.loaded_model(mine, 1) is made[2].model
        with pytest.raises(UnsupportedError, match="models of rank 1"):
            engine_names.loaded_model(SimpleNamespace(), 1)
    monkeypatch.setitem(sys.modules, engine_names.MODEL_ENGINE, None)  # as if it were absent
    with pytest.raises(UnsupportedError, match="model_engine was not found"):
        engine_names.loaded_model(mine, 1)


# --- the parts --------------------------------------------------------------------------------


def layers_of(order: str = "HND", gather: Any = None, ranks: int = 1) -> tuple[TrtllmLayers, Any]:
    """The stand-in modules of a tiny Llama, lent, and the view they write to."""
    from kvcore_trtllm.testing.model import load

    model = load(tiny_model("llama"))
    args = SimpleNamespace(attn_backend="TRTLLM" if order == "HND" else "VANILLA")
    lent = modules.model_of_rank(args, model, 0, ranks).model
    config = model.config
    heads = config.num_key_value_heads // ranks
    shape = BlockShape(config.num_hidden_layers, heads, config.head_dim, 8, "float32")
    pool = torch.full((5, shape.layers, 2, heads * 8 * config.head_dim), torch.nan)
    view = KVView(trtllm_layout(shape, 5, 8, order), [pool])
    rotary = functools.partial(_rotary, modules.RotaryEmbedding)
    return TrtllmLayers(lent, view, rotary, max_rows=None, gather=gather), view


def _rotary(kind: Any, attention: Any) -> Any:
    params = attention.pos_embd_params
    return kind(params.rope, head_dim=attention.head_dim, is_neox=params.is_neox)


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_rows_are_written_where_the_engine_reads_them(order: str) -> None:
    from kvcore.fusion.plan import LayerKV

    layers, view = layers_of(order)
    heads, dim = view.layout.kv_heads, view.layout.planes[0][0].head_dim
    slots = torch.tensor([3, 17, 38])
    kv = LayerKV(torch.randn(3, heads, dim), torch.randn(3, heads, dim))
    layers.write(1, kv, slots)
    for plane, rows in zip(view.layout.planes[1], (kv.keys, kv.values), strict=True):
        # the reference's own reading: [pages, tokens, 1, heads, dim, 1] of integers
        held = _plane_view(view, plane).flatten(1, 2).flatten(3).view(torch.float32)
        assert torch.equal(held[slots // 8, slots % 8], rows)
    written = int((~torch.isnan(view.tensors[0])).sum())
    assert written == 2 * 3 * heads * dim, "something else was overwritten"


def test_a_layer_is_as_it_was_before_whatever_attention_raises() -> None:
    with installed("1.3"):
        layers, _ = layers_of()
        module = layers._attention[0]
        before = dict(vars(module))
        hidden = torch.randn(4, 128)

        def raising(q: Any, k: Any, v: Any) -> Any:
            assert not module.rope_fusion
            assert module.rotary_emb is not None
            raise KeyError("out of here")

        with pytest.raises(KeyError):
            layers.run(0, torch.arange(4), HiddenState(hidden, None), raising)
        assert vars(module) == before
        assert module.rope_fusion
        with pytest.raises(UnsupportedError, match="kernel"):
            module.forward_impl(hidden, None, None, None, None, None, None, None)


def test_scores_are_added_up_over_ranks_alike_everywhere() -> None:
    parts = [torch.randn(7) for _ in range(3)]
    layers, _ = layers_of(gather=lambda own: [part.numpy().tobytes() for part in parts])
    found = layers.reduce(parts[1])
    assert torch.equal(found, (parts[0] + parts[1]) + parts[2])
    alone, _ = layers_of()
    assert alone.reduce(parts[0]) is parts[0]
    assert layers.collective, "an error in a layer would leave the others in a sum"
    assert not alone.collective


def test_signatures_of_the_stand_ins_are_those_that_are_checked() -> None:
    taken = list(inspect.signature(modules.DecoderLayer.forward).parameters)
    assert taken[1:5] == ["position_ids", "hidden_states", "attn_metadata", "residual"]
    taken = list(inspect.signature(modules.Attention.forward_impl).parameters)
    assert taken[1:5] == ["q", "k", "v", "attn_metadata"]


# --- the salt ---------------------------------------------------------------------------------

spans = st.lists(st.integers(0, 99), min_size=2, max_size=8, unique=True).map(
    lambda cuts: tuple(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False))
)


@settings(max_examples=50, deadline=None)
@given(
    tenant=st.text(max_size=20),
    ratio=st.none() | st.floats(0, 1),
    chunks=st.none() | spans,
    enabled=st.booleans(),
)
def test_a_salt_says_what_was_asked(
    tenant: str, ratio: float | None, chunks: Any, enabled: bool
) -> None:
    asked = {"ratio": ratio, "chunks": chunks, "enabled": enabled}
    first, second = (fusion_salt(tenant, **asked) for _ in range(2))
    assert first != second
    wish = read_salt(first, 100)
    assert wish is not None
    assert wish.options == FusionOptions(enabled, ratio, chunks)
    assert wish.salt == (tenant or None)


@pytest.mark.parametrize("salt", [None, "", "tenant", "kvcore"])
def test_other_salts_say_nothing(salt: str | None) -> None:
    assert read_salt(salt, 10) is None


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("nonsense", "cache_salt"),
        ("{}", "once"),
        ('{"once": ""}', "once"),
        ('{"once": "x", "fusion": {"ratio": 2}}', "ratio"),
        ('{"once": "x", "fusion": {"chunks": [[5, 50]]}}', "chunks"),
        ('{"once": "x", "ratio": 0.5}', "ratio"),
    ],
)
def test_salts_without_sense(content: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        read_salt(PREFIX + content, 10)
    assert content not in str(refused.value), "a salt is a secret"
