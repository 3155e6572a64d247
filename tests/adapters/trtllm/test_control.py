"""What a request asks of kvcore in its salt, on TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

import kvcore_trtllm.testing.conformance as trtllm  # after the skip
from kvcore.connector.control import ControlReader, RequestControl
from kvcore.errors import ConfigError
from kvcore.harness.models import tiny_model
from kvcore.telemetry.metrics import Metrics
from kvcore.testing.conformance import Ask, Kit
from kvcore.testing.conformance.cases.fusion import FUSED, chunks_of, mixed
from kvcore_trtllm.requests import control_of, wish_of
from kvcore_trtllm.salt import PREFIX, Wish, read_salt, request_salt
from support.trtllm_parts import request


@settings(max_examples=50, deadline=None)
@given(
    tenant=st.text(max_size=20),
    asked=st.fixed_dictionaries(
        {"save": st.booleans()},
        optional={"load": st.booleans(), "save_tokens": st.none() | st.integers(0, 1 << 40)},
    ),
    fused=st.booleans(),
)
def test_a_salt_says_what_was_asked(tenant: str, asked: dict[str, Any], fused: bool) -> None:
    salt = request_salt(tenant, {"ratio": 0.2} if fused else None, **asked)
    control = control_of(request(cache_salt=salt), ControlReader(Metrics()))
    assert control == RequestControl(**asked)
    wish = read_salt(salt, 100)
    assert wish is not None
    assert wish.salt == (tenant or None), "the tenant's KV is looked up under its own salt"
    assert (wish.options is not None) == fused
    again = request_salt(tenant, {"ratio": 0.2} if fused else None, **asked)
    assert (salt == again) != fused, "one that asks for fusion is for one request"


@pytest.mark.parametrize(
    "salt", [PREFIX + "nonsense", PREFIX + "[1]", PREFIX + "{" * 9999, PREFIX + '{"save": "no"}']
)
def test_a_salt_that_cannot_be_read_is_computed_without_kvcore(salt: str) -> None:
    metrics = Metrics()
    control = control_of(request(cache_salt=salt), ControlReader(metrics))
    assert control.error
    assert not control.load
    assert not control.save
    assert len(metrics.snapshot()["kvcore_request_controls_total"]) == 1
    assert salt not in control.error, "a salt is a secret"


@pytest.mark.parametrize("salt", [None, "", "tenant", "kvcore", PREFIX + '{"once": "x"}'])
def test_other_salts_ask_for_nothing(salt: str | None) -> None:
    metrics = Metrics()
    control = control_of(request(cache_salt=salt), ControlReader(metrics))
    assert control == RequestControl()
    assert not metrics.snapshot()


def test_fusion_that_cannot_be_read_leaves_the_rest() -> None:
    asked = request(cache_salt=PREFIX + '{"once": "x", "fusion": {"ratio": 7}, "save": false}')
    assert wish_of(asked, 100) is None
    assert control_of(asked, ControlReader(Metrics())) == RequestControl(save=False)
    with pytest.raises(ConfigError, match="once"):
        read_salt(PREFIX + '{"save": false, "fusion": {}}', 100)
    assert read_salt(PREFIX + '{"save": false}', 100) == Wish(None, None)


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with Kit(trtllm.driver(), tmp_path, model=tiny_model("llama")) as made:
        yield made


@pytest.mark.slow
def test_a_tenant_is_the_same_with_and_without_a_wish(kit: Kit) -> None:
    """And what cannot be read is stored for nobody."""
    with kit.engine() as engine:
        ask = Ask(kit.tokens(1, 200), salt="a")
        wish = Ask(ask.tokens, salt="a", asked={"save_tokens": 1000})
        kit.stored(engine, [wish])
        [answer] = engine.ask([ask])
        assert answer.reused_tokens == kit.reusable(ask)
        [answer] = engine.ask([Ask(ask.tokens, salt="b", asked={"save_tokens": 1000})])
        assert not answer.reused_tokens
        before = engine._leader.manager.index.num_used("host")  # type: ignore[attr-defined]
        other = kit.tokens(2, 200)
        engine.ask([Ask(other, salt="a", asked={"save": "no"})])
        engine.settle()
        assert engine._leader.manager.index.num_used("host") == before  # type: ignore[attr-defined]


@pytest.mark.slow
def test_no_blend_where_no_load_is_wanted(kit: Kit) -> None:
    with kit.engine(kit.config(fusion=FUSED)) as engine:
        chunks = chunks_of(kit, 300)
        kit.stored(engine, [Ask(chunk, 1) for chunk in chunks])
        [prompt, *_] = mixed(kit, chunks, 400)
        wish = {"ratio": 1.0, "chunks": prompt.spans}
        for asked, blends in (({"save": False}, True), ({"load": False}, False)):
            [answer] = engine.ask([Ask(prompt.tokens, fusion=wish, asked=asked)])
            kit.assert_same([answer], [Ask(prompt.tokens)])
            assert bool(answer.reused.get("blend")) == blends
