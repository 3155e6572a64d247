"""Hooks around attention: who answers, what is seen, and what a broken one costs."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcore.errors import UnsupportedError
from kvcore.plugins.attention import AttentionBatch, AttentionCall, AttentionHook, Hooks
from kvcore_vllm.attention import Batches, install, lent

HEADS, KV_HEADS, DIM = 4, 2, 8


class Noting(AttentionHook):
    """Answers and changes what it is told to, and keeps what it saw."""

    name = "noting"

    def __init__(self, answer: Tensor | None = None, changed: Tensor | None = None) -> None:
        self.answer, self.changed = answer, changed
        self.seen: list[AttentionCall] = []
        self.outputs: list[Tensor] = []

    def before(self, call: AttentionCall) -> Tensor | None:
        self.seen.append(call)
        return self.answer

    def after(self, call: AttentionCall, output: Tensor) -> Tensor | None:
        self.outputs.append(output.clone())
        return self.changed


class Broken(AttentionHook):
    name = "broken"

    def before(self, call: AttentionCall) -> Tensor | None:
        raise RuntimeError("before")


class Misshapen(AttentionHook):
    name = "misshapen"

    def after(self, call: AttentionCall, output: Tensor) -> Tensor | None:
        return output[:1]


class Impl:
    """Attention as vLLM's backends are called: writes ones into its output."""

    calls = 0

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> Tensor:
        self.calls += 1
        output[: 0 if attn_metadata is None else attn_metadata.num_actual_tokens] = 1.0
        return output


def metadata(counts: list[int], contexts: list[int]) -> Any:
    starts = torch.tensor([0, *counts]).cumsum(0)
    return SimpleNamespace(
        num_actual_tokens=sum(counts),
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor([a + b for a, b in zip(counts, contexts, strict=True)]).int(),
        block_table=torch.arange(3 * len(counts)).view(len(counts), 3),
    )


def step(layer: Any, told: Any, padding: int = 0) -> Tensor:
    """One call of a layer's implementation, with rows of padding behind as graphs have them."""
    rows = (0 if told is None else told.num_actual_tokens) + padding
    query = torch.randn(rows, HEADS, DIM)
    key, value = torch.randn(rows, KV_HEADS, DIM), torch.randn(rows, KV_HEADS, DIM)
    output = torch.zeros(rows, HEADS, DIM)
    layer.impl.forward(layer, query, key, value, torch.empty(0), told, output)
    return output


def layers(count: int = 2) -> list[Any]:
    return [SimpleNamespace(impl=Impl()) for _ in range(count)]


def test_a_hook_sees_rows_positions_and_pages_of_each_request() -> None:
    watching, made = Noting(), layers()
    install(made, [watching], lambda: ["a", "b", "c"], 16)
    step(made[1], metadata([5, 1, 3], [0, 40, 16]), padding=7)
    [call] = watching.seen
    assert call.layer == 1
    assert call.query.shape == (9, HEADS, DIM)
    assert call.key.shape == call.value.shape == (9, KV_HEADS, DIM)
    batch = call.batch
    assert batch.requests == ("a", "b", "c")
    assert batch.starts.tolist() == [0, 5, 6, 9]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 40, 16, 17, 18]
    assert batch.pages.shape == (3, 3)
    assert batch.page_tokens == 16


def test_an_answer_stands_in_for_the_engines_and_a_change_follows_it() -> None:
    answer, changed = torch.full((4, HEADS, DIM), 2.0), torch.full((4, HEADS, DIM), 3.0)
    first, second, made = Noting(), Noting(answer, changed), layers()
    install(made, [first, second], lambda: ["a"], 16)
    output = step(made[0], metadata([4], [0]), padding=2)
    assert made[0].impl.calls == 0
    assert torch.equal(output[:4], changed)
    assert not output[4:].any(), "rows of padding were written"
    assert torch.equal(first.outputs[0], answer)
    assert torch.equal(second.outputs[0], answer)
    first.answer = second.changed = None
    second.answer = None
    output = step(made[0], metadata([4], [0]))
    assert made[0].impl.calls == 1
    assert torch.equal(output, torch.ones_like(output))


def test_warming_up_reaches_no_hook() -> None:
    watching, made = Noting(), layers()
    install(made, [watching], list, 16)
    step(made[0], None, padding=3)
    assert not watching.seen
    assert made[0].impl.calls == 1


@pytest.mark.parametrize("broken", [Broken(), Misshapen()], ids=lambda hook: hook.name)
def test_a_hook_that_fails_is_left_out_from_then_on(
    broken: AttentionHook, caplog: pytest.LogCaptureFixture
) -> None:
    watching, made = Noting(), layers()
    hooks = install(made, [broken, watching], lambda: ["a"], 16)
    with caplog.at_level(logging.ERROR, "kvcore.plugins.attention"):
        for _ in range(3):
            output = step(made[1], metadata([4], [0]))
            assert torch.equal(output, torch.ones_like(output))
    assert hooks.active == (watching,)
    assert len(watching.outputs) == 3
    told = [record.message for record in caplog.records]
    assert told == [f"attention hook {broken.name!r} failed at layer 1 and is not called again"]


def test_when_all_have_failed_nothing_is_made_for_them() -> None:
    made = layers()
    install(made, [Broken()], lambda: ["a"], 16)
    step(made[0], metadata([2], [0]))
    told = metadata([2], [0])
    del told.query_start_loc
    output = step(made[0], told)
    assert torch.equal(output, torch.ones_like(output))


def test_a_backend_that_is_called_otherwise_is_refused_and_left_as_it_was() -> None:
    class Other:
        def forward(self, query: Tensor) -> Tensor:
            return query

    made = [*layers(1), SimpleNamespace(impl=Other())]
    with pytest.raises(UnsupportedError, match=r"Other\.forward takes"):
        install(made, [Noting()], lambda: ["a"], 16)
    assert not any("forward" in vars(layer.impl) for layer in made)


def test_a_batch_is_made_once_a_step() -> None:
    batches = Batches(lambda: ["a"], 16)
    told = metadata([2], [3])
    assert batches.of(told, 0) is batches.of(told, 1)
    assert batches.of(metadata([2], [4]), 1).positions.tolist() == [4, 5]
    first = batches.of(told, 0)
    told.seq_lens += 1  # vLLM fills it again for the next step
    assert batches.of(told, 0).positions.tolist() == [p + 1 for p in first.positions.tolist()]


def test_metadata_that_cannot_be_read_leaves_the_engine_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watching, made = Noting(), layers()
    hooks = install(made, [watching], lambda: ["a", "b"], 16)  # of two requests, one has rows
    told = metadata([4], [0])
    told.num_actual_tokens = 3
    with caplog.at_level(logging.ERROR, "kvcore.plugins.attention"):
        for _ in range(2):
            step(made[0], told)
    assert made[0].impl.calls == 2
    assert not watching.seen
    assert hooks.active == ()
    assert len(caplog.records) == 1


def test_a_module_is_lent_for_a_block_only() -> None:
    class Module:
        num_heads, num_kv_heads, head_size, head_size_v = HEADS, KV_HEADS, DIM, DIM

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return query

    module, answer = Module(), torch.rand(3, HEADS, DIM)
    hook = Noting(answer)
    rows = torch.arange(3)
    batch = AttentionBatch(("a",), torch.tensor([0, 3]), rows, torch.zeros(1, 1), 16)
    flat = torch.rand(3, HEADS * DIM)
    with lent(module, 7, hook, batch):
        got = module.forward(flat, flat[:, : KV_HEADS * DIM], flat[:, : KV_HEADS * DIM])
        assert torch.equal(got, answer.reshape(3, -1))
    assert hook.seen[0].layer == 7
    assert hook.seen[0].key.shape == (3, KV_HEADS, DIM)
    assert "forward" not in vars(module)
    with pytest.raises(RuntimeError, match="inside"), lent(module, 7, hook, batch):
        raise RuntimeError("inside")
    assert "forward" not in vars(module)


def test_no_hooks_answer_nothing() -> None:
    batch = AttentionBatch(("a",), torch.tensor([0, 1]), torch.arange(1), torch.zeros(1, 1), 16)
    one = torch.rand(1, HEADS, DIM)
    call = AttentionCall(0, one, one, one, batch)
    assert Hooks([]).before(call) is None
    assert Hooks([]).after(call, one) is one
