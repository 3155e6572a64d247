"""What SGLang's adapter says without SGLang: its command line, its hooks around fakes, its gate."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.config import SECRETS_VARIABLE, load_config
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.telemetry.rates import ForwardPart
from kvcore_sglang import hooks, plugin

# --- the command line ----------------------------------------------------------------------------


def test_the_command_names_the_linker_and_carries_the_settings() -> None:
    config = load_config(overrides={"engine": "sglang", "host": {"capacity": "2GiB"}}, env={})
    command = plugin.serve("MODEL", config, ["--tp-size", "2"])
    text = " ".join(command.argv)
    assert "-m sglang.launch_server --model-path MODEL" in text
    assert "--enable-unified-cache-external-linker" in command.argv
    assert command.argv[-2:] == ["--tp-size", "2"]
    flag = command.argv.index("--unified-cache-external-linker-config")
    assert json.loads(command.argv[flag + 1]) == {
        "linker": "KVCoreLinker",
        "linker_module_path": "kvcore_sglang.linker",
        "linker_extra_config": {"host": {"capacity": 2 << 30}},
    }
    assert command.env == {"KVCORE_CONFIG": "", SECRETS_VARIABLE: ""}


def test_a_secret_is_not_on_the_command_line() -> None:
    config = load_config(overrides={"namespace": {"secret": "hush" * 4}}, env={})
    command = plugin.serve("MODEL", config, [])
    assert "hush" not in " ".join(command.argv)
    assert json.loads(command.env[SECRETS_VARIABLE]) == {"namespace": {"secret": "hush" * 4}}


@pytest.mark.parametrize(
    "flag",
    [
        "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-config={}",
        "--unified_cache_external_linker_backend",
    ],
)
def test_flags_that_it_writes_itself_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="writes --unified-cache-external-linker"):
        plugin.serve("MODEL", load_config(env={}), [flag])


# --- hooks ---------------------------------------------------------------------------------------


class Linker:
    wants_inserts = True
    stages = False
    vocabulary = 1000

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.state = {"in_flight": 0}

    def ask(self, key: Any, device_tokens: int, req: Any) -> None:
        self.calls.append(("ask", key, device_tokens, req))

    def asked(self) -> None:
        self.calls.append("asked")

    def keeps_out(self, req: Any) -> bool:
        return False

    def begin_insert(self) -> None:
        self.calls.append("begin")

    def abandon_insert(self) -> None:
        self.calls.append("abandon")

    def end_insert(self, key: Any, slots: Any) -> None:
        self.calls.append(("end", key, slots))

    def refuse(self, rids: list[str]) -> None:
        self.calls.append(("refuse", rids))

    def ended(self, rid: str, outcome: str, headers: dict[str, str]) -> None:
        self.calls.append(("ended", rid, outcome, headers))


def cache_of(linker: Any, slots: int = 4) -> Any:
    tree = SimpleNamespace(collect_full_device_indices=lambda node, root: range(slots))
    return SimpleNamespace(
        linker=SimpleNamespace(cache_linker=linker, pending_offloads=[]),
        tree_core=tree,
        root_node_handle=lambda extra_key: 0,
    )


def test_another_linker_or_none_is_passed_through() -> None:
    for cache in (SimpleNamespace(), SimpleNamespace(linker=None), cache_of(object())):
        params = SimpleNamespace(key=None)
        assert hooks.around_insert(lambda c, p: (c, p), cache, params) == (cache, params)
        assert hooks.around_finish_loads(lambda c, reqs: reqs, cache, ["failed"]) == ["failed"]
        wrapper = SimpleNamespace(cache=cache)
        assert hooks.around_match(lambda *a: a[1:], wrapper, 1, 2, 3) == (1, 2, 3)


def test_a_match_tells_the_linker_whose_tokens_are_looked_up() -> None:
    """And whether the request was retracted with a part of its answer."""
    linker = Linker()
    wrapper = SimpleNamespace(cache=cache_of(linker))
    result = SimpleNamespace(device_prefix_len=32)

    def match(wrapper: Any, key: Any, req: Any, result: Any) -> str:
        linker.calls.append("lookup")
        return "matched"

    req = SimpleNamespace()
    assert hooks.around_match(match, wrapper, "key", req, result) == "matched"
    assert linker.calls == [("ask", "key", 32, req), "lookup", "asked"]


PICTURE = SimpleNamespace(mm_items=[object()])


@pytest.mark.parametrize(
    ("fields", "alone"),
    [
        ({"positional_embed_overrides": [1]}, True),
        ({"input_embeds": [[0.5]]}, True),
        ({"multimodal_inputs": PICTURE, "origin_input_ids": [5, 6]}, True),
        ({"multimodal_inputs": PICTURE, "origin_input_ids": [5, 1_000_007]}, False),
        ({"multimodal_inputs": SimpleNamespace(mm_items=[]), "origin_input_ids": [5]}, False),
        ({"multimodal_inputs": None, "origin_input_ids": [5]}, False),
    ],
)
def test_tokens_that_do_not_tell_their_kv_are_neither_looked_up_nor_kept(
    fields: dict[str, Any], alone: bool
) -> None:
    """A picture that no token stands for, as under Transformers' code. Where numbers beyond the
    vocabulary stand for it, the linker leaves the request alone by itself."""
    wrapper = SimpleNamespace(cache=cache_of(Linker()))
    req = SimpleNamespace(skip_radix_cache_insert=False, **fields)
    result = SimpleNamespace(device_prefix_len=0)
    found = hooks.around_match(lambda *a: "matched", wrapper, "key", req, result)
    assert found is (result if alone else "matched")
    assert req.skip_radix_cache_insert is alone


def test_such_requests_are_not_kept_if_they_are_never_looked_up() -> None:
    """A request of less than a page is not."""
    scheduler, made = Scheduler(), Req("a")
    made.input_embeds = [[0.5]]

    def queue(scheduler: Scheduler, message: Any) -> None:
        scheduler.waiting_queue.append(made)

    hooks.around_handle_generate_request(queue, scheduler, SimpleNamespace(rid="a"))
    assert made.skip_radix_cache_insert


@pytest.mark.parametrize("fails", [False, True])
def test_storages_are_told_of_new_weights(fails: bool) -> None:
    """Even of an update that has failed, perhaps halfway. What is gone is not told."""
    told: list[str] = []

    class Storage:
        def weights_changed(self) -> None:
            told.append("changed")

    def update(updater: Any, request: str) -> str:
        assert not told  # HiCache still writes what the old weights have computed
        if fails:
            raise RuntimeError(request)
        return request

    storage, gone = Storage(), Storage()
    hooks.storages.add(storage)
    hooks.storages.add(gone)
    del gone
    updater = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=None))
    if fails:
        with pytest.raises(RuntimeError, match="disk"):
            hooks.around_update(update, updater, "disk")
    else:
        assert hooks.around_update(update, updater, "disk") == "disk"
    assert told == ["changed"]
    hooks.storages.discard(storage)


@pytest.mark.parametrize("blended", [True, False])
def test_a_blended_request_is_barred_from_the_tree(blended: bool) -> None:
    linker: Any = Linker()
    linker.blends = lambda rid: blended
    linker.place = lambda rid, slots: linker.calls.append((rid, slots))
    tails = {"one": range(9, 12)}
    wrapper = SimpleNamespace(cache=cache_of(linker), private_load_indices=tails)
    req = SimpleNamespace(rid="one", extra_key=None, last_node=3, skip_radix_cache_insert=False)
    assert hooks.around_load_back(lambda w, r: (3, 0), wrapper, req) == (3, 0)
    assert req.skip_radix_cache_insert is blended
    assert linker.calls == ([("one", [range(4), range(9, 12)])] if blended else [])


def test_an_insert_that_offers_nodes_is_ended_with_their_slots() -> None:
    linker = Linker()
    cache = cache_of(linker)
    key = type("Key", (), {"extra_key": None, "__len__": lambda self: 6})()
    params = SimpleNamespace(key=key)

    def insert(cache: Any, params: Any) -> str:
        cache.linker.pending_offloads.append(SimpleNamespace(publish_node_ids=[3]))
        return "inserted"

    assert hooks.around_insert(insert, cache, params) == "inserted"
    assert linker.calls == ["begin", ("end", key, range(4))]
    linker.calls.clear()
    assert hooks.around_insert(lambda c, p: "nothing new", cache, params) == "nothing new"
    assert linker.calls == ["begin", "abandon"]
    long = cache_of(linker, slots=9)
    hooks.around_insert(insert, long, params)
    assert linker.calls[-1] == ("end", key, None), "slots of more tokens than the key has"


class Req:
    def __init__(self, rid: str, *, finished: bool = True) -> None:
        self.rid = rid
        self.output_ids: list[int] = []
        self.finished_output = False
        self.finished_reason: Any = None
        self.input_embeds: list[list[float]] | None = None
        self.skip_radix_cache_insert = False
        self._finished = finished

    def finished(self) -> bool:
        return self._finished


class Scheduler:
    def __init__(self) -> None:
        self.tree_cache = cache_of(Linker())
        self.waiting_queue: list[Req] = []

    def handle_generate_request(self, message: Any) -> None:
        def queue(scheduler: Scheduler, message: Any) -> None:
            scheduler.waiting_queue.append(Req(message.rid))

        hooks.around_handle_generate_request(queue, self, message)


@pytest.mark.parametrize("way", ["stream", "abort"])
def test_a_request_whose_load_failed_is_computed_and_not_answered(way: str) -> None:
    scheduler = Scheduler()
    scheduler.handle_generate_request(SimpleNamespace(rid="a"))
    scheduler.handle_generate_request(SimpleNamespace(rid="b"))
    failed, fine = scheduler.waiting_queue
    scheduler.waiting_queue.clear()
    cache = scheduler.tree_cache
    assert hooks.around_finish_loads(lambda c, reqs: [failed], cache, [failed, fine]) == [failed]
    assert cache.linker.cache_linker.calls == [("refuse", ["a"])]
    sent: list[Any] = []
    if way == "stream":
        hooks.around_stream_output(lambda s, reqs, lp: sent.extend(reqs), None, [failed, fine], 0)
        assert sent == [fine]
    else:
        hooks.around_send_abort_output(lambda *a: sent.append(a), scheduler, None, failed)
        assert not sent
        hooks.around_send_abort_output(lambda *a: sent.append(a), scheduler, None, fine)
        assert len(sent) == 1
    assert [req.rid for req in scheduler.waiting_queue] == ["a"]
    assert failed.finished_output, "with overlap it is offered for output twice"
    hooks.around_stream_output(lambda s, reqs, lp: None, None, [failed], 0)
    assert len(scheduler.waiting_queue) == 1, "computed a third time"


def test_one_that_was_answered_in_part_does_not_fail_with_others_of_its_batch() -> None:
    """Its load landed when it was planned, and computed again it would be answered twice."""
    cache, fresh, resumed = cache_of(Linker()), Req("fresh"), Req("resumed")
    resumed.output_ids = [7]
    cache.linker.inflight_load_rids = ["fresh", "resumed", "aborted"]
    cache.linker.private_load_indices = {"fresh": [1], "resumed": [2], "aborted": [3]}

    def finish(cache: Any, reqs: list[Req]) -> list[Req]:
        return [req for req in reqs if req.rid in cache.linker.inflight_load_rids]

    assert hooks.around_finish_loads(finish, cache, [fresh, resumed]) == [fresh]
    assert cache.linker.inflight_load_rids == ["fresh", "aborted"]
    assert cache.linker.private_load_indices.keys() == {"fresh", "aborted"}
    assert cache.linker.cache_linker.calls == [("refuse", ["fresh"])]


@pytest.mark.parametrize("way", ["stream", "abort"])
def test_the_linker_hears_of_every_request_that_ends(way: str) -> None:
    """Not of one that goes on, nor of one that is computed again."""
    scheduler = Scheduler()
    linker = scheduler.tree_cache.linker.cache_linker
    done, going = Req("done"), Req("going", finished=False)
    done.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})
    scheduler.handle_generate_request(SimpleNamespace(rid="again"))
    [again] = scheduler.waiting_queue
    setattr(again, hooks.AGAIN, True)
    if way == "stream":
        streamer = SimpleNamespace(tree_cache=scheduler.tree_cache)
        for reqs in ([done, going, again], [done, going]):  # with overlap, twice
            hooks.around_stream_output(lambda s, r, lp: None, streamer, reqs, 0)
        assert linker.calls == [("ended", "done", "length", {})]
    else:
        for req in (done, again):
            hooks.around_send_abort_output(lambda *a: None, scheduler, None, req)
        assert linker.calls == [("ended", "done", "abort", {})]


class NullTrace:
    """SGLang's, where it does not trace: everything is there, and is itself."""

    tracing_enable = False

    def __getattr__(self, name: str) -> NullTrace:
        return self


def test_a_request_brings_the_trace_that_sglang_has_of_it() -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    number, span = 0x1234, 0x56
    context = trace.set_span_in_context(
        trace.NonRecordingSpan(trace.SpanContext(number, span, True, trace.TraceFlags(1)))
    )
    traced = SimpleNamespace(tracing_enable=True, root_span_context=context)
    req = SimpleNamespace(time_stats=SimpleNamespace(trace_ctx=traced))
    assert hooks.trace_headers(req)["traceparent"] == f"00-{number:032x}-{span:016x}-01"
    for other in (NullTrace(), None):
        assert hooks.trace_headers(SimpleNamespace(time_stats=other)) == {}
        stats = SimpleNamespace(trace_ctx=other)
        assert hooks.trace_headers(SimpleNamespace(time_stats=stats)) == {}


def test_a_failed_request_that_cannot_be_made_again_is_answered_with_the_error() -> None:
    cache = cache_of(Linker())
    stray = Req("stray")
    hooks.around_finish_loads(lambda c, reqs: reqs, cache, [stray])
    sent: list[Any] = []
    hooks.around_stream_output(lambda s, reqs, lp: sent.extend(reqs), None, [stray], 0)
    assert sent == [stray]


def test_what_kvcore_says_is_beside_what_the_engine_says() -> None:
    scheduler = Scheduler()
    output = SimpleNamespace(internal_state={"other": 1})
    got = hooks.around_internal_state(lambda s, r: output, scheduler, None)
    assert got.internal_state == {"other": 1, "kvcore": {"in_flight": 0}}


def test_hooks_that_did_not_take_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def target(self: Any, one: int) -> None: ...

    monkeypatch.setattr(hooks, "_fake", target, raising=False)
    name = "kvcore_sglang.hooks._fake"
    fitting = hooks.Hook(name, ("self", "one"), target)
    assert not hooks._misfit(fitting)
    assert "kvcore expects" in hooks._misfit(fitting._replace(parameters=("self",)))
    assert "was not found" in hooks._misfit(fitting._replace(target=f"{name}_gone"))
    monkeypatch.setattr(hooks, "HOOKS", (fitting,))
    with pytest.raises(UnsupportedError, match=f"not in place at {name}"):
        hooks.check()
    monkeypatch.setattr(hooks, "_originals", {name: target})
    with pytest.raises(UnsupportedError, match="SGLANG_PLUGINS"):
        hooks.check()
    monkeypatch.setattr(hooks, "_fake", lambda self, one: None)
    hooks.check()


# --- how long prefill takes ----------------------------------------------------------------------


def batch(mode: str = "EXTEND", *, pictures: bool = False, **more: Any) -> Any:
    told: dict[str, Any] = {
        "forward_mode": SimpleNamespace(name=mode),
        "return_logprob": False,
        "global_num_tokens_cpu": None,
        "contains_mm_inputs": lambda: pictures,
        "extend_seq_lens_cpu": [40, 1],
        "extend_prefix_lens_cpu": [16, 300],
    }
    return SimpleNamespace(**{**told, **more})


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
def test_what_a_prefill_computes(mode: str) -> None:
    assert hooks.prefill_parts(batch(mode)) == [ForwardPart(40, 16), ForwardPart(1, 300)]


@pytest.mark.parametrize(
    "other",
    [
        batch("DECODE"),
        batch("TARGET_VERIFY"),
        batch("SPLIT_PREFILL"),
        batch(pictures=True),
        batch(return_logprob=True),
        batch(global_num_tokens_cpu=[41, 7]),
    ],
)
def test_a_forward_that_is_more_than_a_prefill_tells_nothing(other: Any) -> None:
    assert hooks.prefill_parts(other) == []


@pytest.mark.parametrize("draft", [True, False])
def test_forwards_of_the_target_model_are_timed(draft: bool) -> None:
    told: list[Any] = []

    @contextlib.contextmanager
    def around_forward(parts: Any) -> Iterator[None]:
        told.append(parts)
        yield
        told.append("ended")

    def forward(runner: Any, batch: Any, *args: Any, **options: Any) -> Any:
        told.append("forward")
        return args, options

    def runner(gate: Any) -> Any:
        pool = SimpleNamespace(layer_transfer_counter=gate)
        return SimpleNamespace(token_to_kv_pool=pool, is_draft_worker=draft)

    ours = SimpleNamespace(around_forward=around_forward)
    assert hooks.around_forward(forward, runner(ours), batch(), 1, x=2) == ((1,), {"x": 2})
    timed = [[ForwardPart(40, 16), ForwardPart(1, 300)], "forward", "ended"]
    assert told == (["forward"] if draft else timed)
    told.clear()
    for other in (None, object()):  # no linker, and HiCache's
        hooks.around_forward(forward, runner(other), batch())
    assert told == ["forward", "forward"]
