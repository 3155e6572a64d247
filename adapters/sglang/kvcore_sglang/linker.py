"""``KVCoreLinker``: kvcore behind SGLang's external cache linker, one in every rank.

    match_prefix ─▶ lookup        the hook around the wrapper's ``match`` gives the tokens
    init_load_back ─▶ load        if True, all ranks have the order and start it with the batch
    set_consumer                  makes the batch's blends, before its forward
    forward ─▶ wait_until(layer)  the KV pool calls it on `LayerGate`
    insert ─▶ offload ─▶ end_insert   called by the hook around the tree's ``insert``

If kvcore cannot serve a model correctly, the model runs untouched: the linker matches and saves
nothing, and logs one warning that says why.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from kvcore import log
from kvcore.config import Config, load_config
from kvcore.connector.control import FREE, ControlReader, RequestControl, without_kvcore
from kvcore.connector.guard import Guard, Neutral, attempt, covered
from kvcore.errors import EngineMustEnd, PagesInUse, RankLostError
from kvcore.model.keys import Namespace
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import TransferGraph
from kvcore_sglang import hooks
from kvcore_sglang.books import Offer, Tokens
from kvcore_sglang.build import Parts
from kvcore_sglang.fusion_scheduler import Asking, asking_of, wishes_of
from kvcore_sglang.gate import FAILED_BATCH, LayerGate
from kvcore_sglang.leader import Leader
from kvcore_sglang.messages import Order
from kvcore_sglang.plugin import linker_base
from kvcore_sglang.ranks import first_problem
from kvcore_sglang.start import start

_log = logging.getLogger("kvcore.sglang")
_T = TypeVar("_T")

_MEETS = frozenset({"holds", "load", "end_insert", "reset"})
"""What the ranks do together: one that stops in it may leave the others waiting."""
_COPIES = frozenset({"load", "start_layer_wise_loading", "finish_layer_wise_loading", "reset"})
"""What starts copies into the engine's pages, or waits for them."""
LAND_S = 30.0
"""Longest wait of a cache flush for copies from and to the engine's pages, in seconds."""


_LinkerBase: Any = linker_base()

_NOTHING = Neutral(lambda: None)
_NO = Neutral(lambda: False)


@covered(
    {
        "leader": _NOTHING,
        "ask": _NOTHING,
        "asked": _NOTHING,
        "lookup": Neutral(list),
        "stages": _NO,
        "holds": _NO,
        "load": _NO,
        "blends": _NO,
        "place": _NOTHING,
        "start_layer_wise_loading": Neutral(lambda: FAILED_BATCH),
        "finish_layer_wise_loading": _NO,
        "cancel_queued_load": Neutral(lambda: True),
        "refuse": _NOTHING,
        "ended": _NOTHING,
        "wants_inserts": _NO,
        "vocabulary": Neutral(lambda: 0),
        "control_of": Neutral(lambda: without_kvcore("kvcore has stopped")),
        "keeps_out": _NO,
        "saving": _NOTHING,
        "begin_insert": _NOTHING,
        "abandon_insert": _NOTHING,
        "end_insert": _NOTHING,
        "offload": _NO,
        "num_completed_offloads": Neutral(lambda: 0),
        "pop_completed_offload": _NO,
        "state": _NOTHING,
        "stop": _NOTHING,
        "weights_changed": _NOTHING,
        "reset": _NOTHING,
        "close": _NOTHING,
    }
)
class KVCoreLinker(_LinkerBase):  # type: ignore[misc]  # the engine's class, unknown to mypy
    """The linker on one rank. Rank 0's has the leader. Called from the scheduler's thread only.

    SGLang documents when it calls the methods of `UnifiedCacheLinker`; `kvcore_sglang.hooks` calls
    the others. Every rank makes the same calls in the same order.

    No error of kvcore reaches SGLang, but for an `EngineMustEnd`: a rank that is out of step with
    the others, or copies of which nobody knows whether they touch pages of other requests. After an
    error kvcore loads, saves and finds nothing until the engine restarts. What SGLang was promised
    fails, and SGLang computes it.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        self.pools: dict[Any, object] = {}
        self.forward_stream = forward_stream
        self._config: Config = load_config(
            overrides=extra_config, overrides_from="linker_extra_config"
        )
        log.configure(self._config.log.level, self._config.log.format)
        self._many_loras = bool(
            getattr(server_args, "enable_lora", False) or getattr(server_args, "lora_paths", None)
        )
        self._epoch = secrets.token_hex(16)
        self._changed = False
        """True if weights were changed in place since the last flush."""
        if not self._config.sglang.keep_on_flush and not server_args.admin_api_key:
            _log.warning(
                "sglang.keep_on_flush is false, and SGLang has no --admin-api-key: every client "
                "can erase every tier with /flush_cache"
            )
        self._parts = start(self._config, server_args, params, components, forward_stream)
        worker = self._parts.worker if self._parts else None
        self.layer_done_counter = LayerGate(
            worker,
            layers=len(self._parts.served.pool.view.layout.planes) if self._parts else 0,
            layerwise=self._config.sglang.layerwise,
        )
        self._asking: tuple[Any, int, Any] | None = None
        self._stages = False
        """True if KV can be in tiers below host memory, which requests may be held back for."""
        if self._parts is not None and hooks.fit(hooks.HOLD_HOOKS):
            own = self._config.disk.path is not None or bool(self._config.tiers)
            self._stages = own or self._config.server.address is not None
        self._queued: dict[str, Order] = {}
        leader = self.leader
        self._controls = ControlReader(leader.metrics if leader else Metrics(enabled=False))
        self._inserting: list[Offer] | None = None
        self._saving: Any = None
        """The request whose KV the tree takes now; None if that is not known."""
        self._offered = 0
        self._spoilt = False
        """True if what was planned for the next batch must fail."""
        self._stopped = ""
        """Why kvcore has stopped on this rank, after an error; empty before."""
        hooks.linkers.add(self)

    @property
    def leader(self) -> Leader | None:
        """The leader on rank 0; None on other ranks, and if kvcore does not serve the model."""
        return self._parts.leader if self._parts else None

    # -- the request of a lookup ------------------------------------------------------------

    def ask(self, key: Any, device_tokens: int, req: Any) -> None:
        """Keep the key and the request of the match that begins: `lookup` gets only page hashes."""
        self._asking = key, device_tokens, req
        if self.leader is not None:
            self.leader.ask_anew(req.rid)

    def asked(self) -> None:
        """Forget them, because the match has ended."""
        self._asking = None

    def _tokens(self, key: Any) -> Tokens | None:
        """Return a key's token ids, or None if they do not determine its KV (with images, say)."""
        tokens = np.asarray(key.raw_token_ids(), dtype=np.int64)
        assert self._parts is not None
        if key.is_bigram or not len(tokens) or int(tokens.max()) >= self._parts.served.vocabulary:
            return None
        return tokens if int(tokens.min()) >= 0 else None

    def _namespace(self, leader: Leader, key: Any) -> Namespace:
        """Return the namespace of a key.

        SGLang names LoRA weights by a number or a folder, which means nothing in another process.
        Their KV is therefore found by this engine only.
        """
        extra, salt = key.extra_key, key.cache_salt
        if not extra:
            return leader.namespaces.of("", salt)
        lora = f"{self._epoch}:{extra}" if self._many_loras else f"key:{extra}"
        return leader.namespaces.of(lora, salt)

    # -- lookup and load --------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Return the prefix lengths, in pages, that can be loaded.

        The leader decides. The other ranks return all lengths, and the tree takes what all ranks
        have in common.
        """
        pages = len(transfers[0].keys)
        if self._parts is None:
            return []
        if self._parts.leader is None:
            return list(range(1, pages + 1))
        return [] if self._stopped else self._lookup(self._parts.leader, rid)

    def _lookup(self, leader: Leader, rid: str) -> list[int]:
        if self._asking is None:
            return []
        key, device_tokens, req = self._asking
        tokens = self._tokens(key)
        if tokens is None or self._parts is None:
            return []
        resumed = bool(req.output_ids)  # retracted after a part of its answer: no blend then
        asking = None if resumed else self._prompt(req, tokens)
        namespace = self._namespace(leader, key)
        control = self.control_of(req)
        gain = leader.lookup(
            rid, tokens, device_tokens, namespace, asking, resumed=resumed, control=control
        )
        return [gain // self._parts.served.page_tokens] if gain else []

    def control_of(self, req: Any) -> RequestControl:
        """Return what a request asks of kvcore. It is read once, and kept at the request."""
        found: RequestControl | None = getattr(req, hooks.CONTROL, None)
        if found is None:
            found = self._controls.read(req.rid, wishes_of(req))
            setattr(req, hooks.CONTROL, found)
        return found

    def keeps_out(self, req: Any) -> bool:
        """Return True if a request must stay out of SGLang's tree, the same on all ranks.

        That is so if it asks not to be saved, and kvcore cannot tell whose KV the tree takes.
        """
        return not hooks.fit(hooks.SAVE_HOOKS) and not self.control_of(req).saves_all

    def _prompt(self, req: Any, tokens: Tokens) -> Asking | None:
        """Return the prompt that begins with ``tokens``, or None if that is not certain."""
        asking = asking_of(req)
        whole = asking.tokens
        assert self._parts is not None
        if len(whole) <= len(tokens) or not np.array_equal(whole[: len(tokens)], tokens):
            return None
        rest = whole[len(tokens) :]
        known = int(rest.min()) >= 0 and int(rest.max()) < self._parts.served.vocabulary
        return asking if known else None

    @property
    def stages(self) -> bool:
        """True if a request is looked up as soon as it arrives, because its KV may take a while.

        The same on all ranks.
        """
        return self._stages

    def holds(self, rid: str, *, resting: bool) -> bool:
        """Return True, on all ranks alike, if a request stays in the queue. See `Leader.holds`."""
        if not self._stages or self._config.sglang.prefetch == "best_effort":
            return False
        order = self._decide(lambda leader: Order(hold=leader.holds(rid, resting=resting)))
        return order.hold

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Plan the load of a request; return False, on all ranks alike, if the blocks are gone."""
        if self._parts is None:
            return False
        order = self._decide(lambda leader: self._plan(leader, rid, transfers[0]))
        if order.at_once:
            return self._load_at_once(self._parts, rid, order.graphs)
        if not order.empty:
            self._queued[rid] = order
        return not order.empty

    def _plan(self, leader: Leader, rid: str, transfer: Any) -> Order:
        resumed = leader.is_resumed(rid)
        order = leader.load(rid, transfer.device_indices.cpu().numpy())
        order.at_once = resumed and not order.empty
        return order

    def _load_at_once(self, parts: Parts, rid: str, graphs: Sequence[TransferGraph]) -> bool:
        """Load for a request that was answered in part. Blocks; all ranks end it together.

        If such a load failed during the forward, the request could not be computed again without
        answering twice.
        """
        gate = self.layer_done_counter
        landed = gate.finish(gate.start(graphs))
        if not first_problem(parts.served.rank, "" if landed else "failed"):
            return True
        self.refuse([rid])
        return False

    def blends(self, rid: str) -> bool:
        """Return True if the load that was just planned for a request contains a blend."""
        order = self._queued.get(rid)
        return order is not None and bool(order.blends)

    def place(self, rid: str, slots: Sequence[torch.Tensor]) -> None:
        """Set the slots of a request that will be blended, from its first token on."""
        assert self._parts is not None
        page = self._parts.served.page_tokens
        pages = torch.cat(list(slots))[::page].cpu() // page
        for blend in self._queued[rid].blends:
            blend.pages = pages.tolist()

    def start_layer_wise_loading(self) -> int:
        """Start the planned loads of the next batch; return its index, or -1 if it has none."""
        orders, self._queued = list(self._queued.values()), {}
        spoilt, self._spoilt = self._spoilt, False
        index = self.layer_done_counter.start(
            [graph for order in orders for graph in order.graphs],
            [blend for order in orders for blend in order.blends],
        )
        if spoilt:
            self.layer_done_counter.spoil(index)
        self._hear_gate()
        return index

    def _hear_gate(self) -> None:
        """Stop the leader if this rank's worker does no more work."""
        if self.leader is not None and (why := self.layer_done_counter.stopped):
            self.leader.disable(why)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Block until a batch's loads have ended; return True if all of its KV is right."""
        landed = self.layer_done_counter.finish(counter_index)
        self._hear_gate()
        return landed

    def cancel_queued_load(self, rid: str) -> bool:
        """Drop the planned load of a request; return True if there was one."""
        order = self._queued.pop(rid, None)
        if order is not None and self.leader is not None:
            self._guarded(None, lambda leader: leader.drop(rid, order))
        return order is not None

    def refuse(self, rids: Sequence[str]) -> None:
        """Record that the loads of these requests failed on some rank.

        The engine computes the requests. They are not looked up again.
        """
        if self.leader is not None:
            self._guarded(None, lambda leader: leader.refuse(rids))

    def ended(self, rid: str, outcome: str, headers: Mapping[str, str]) -> None:
        """Record that the engine is done with a request. See `Leader.ended`."""
        if self.leader is not None:
            self.leader.ended(rid, outcome, headers)

    # -- offload ----------------------------------------------------------------------------

    @property
    def wants_inserts(self) -> bool:
        """True if kvcore serves the model."""
        return self._parts is not None

    @property
    def vocabulary(self) -> int:
        """The model's number of tokens, where kvcore serves it."""
        assert self._parts is not None
        return self._parts.served.vocabulary

    def saving(self, req: Any) -> None:
        """Note that the tree takes the KV of ``req`` from now on; None ends that."""
        self._saving = req

    def begin_insert(self) -> None:
        """Begin an insert: the nodes that are offered next belong to it."""
        self._inserting = []

    def abandon_insert(self) -> None:
        """End an insert that offered nothing, on all ranks alike."""
        self._inserting = None

    def end_insert(self, key: Any, slots: torch.Tensor | None) -> None:
        """End an insert, and start its saves on this rank. All ranks end it together.

        The tree now has ``key``. ``slots`` are its token slots up to the last node that was
        offered; None if they are unknown.
        """
        offers, self._inserting = self._inserting or [], None
        order = self._decide(lambda leader: self._inserted(leader, key, slots, offers))
        if order.graphs and self._parts is not None:
            self._parts.worker.carry_out(order)

    def _inserted(
        self, leader: Leader, key: Any, slots: torch.Tensor | None, offers: list[Offer]
    ) -> Order:
        try:
            tokens = None if slots is None else self._tokens(key)
            if tokens is None or slots is None:
                return Order()
            places = slots.cpu().numpy()
            namespace, known = self._namespace(leader, key), self._saving
            control = FREE if known is None else self.control_of(known)
            return leader.inserted(tokens[: len(places)], namespace, places, offers, control)
        finally:
            for offer in offers:
                offer.open = False

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Accept a node. The end of its insert decides what of it is saved."""
        if self._parts is None or self._inserting is None:
            return False
        self._offered += 1
        if self.leader is not None and (offer := self._guarded(None, Leader.offer)) is not None:
            self._inserting.append(offer)
        return True

    def num_completed_offloads(self) -> int:
        """Return how many of the oldest accepted nodes are no longer read.

        Once kvcore has stopped, all of them as soon as no copy is in flight: no save follows.
        """
        leader = self.leader
        if leader is None or self._parts is None:
            return self._offered
        done = self._guarded(0, Leader.done_offers)
        if self._stopped or leader.disabled:
            done = self._offered if self._parts.worker.quiesce(0.0) else 0
        return min(done, self._offered)

    def pop_completed_offload(self) -> bool:
        """Take the oldest accepted node. Returns False, so that the tree offers the node again.

        kvcore knows by itself which blocks it has.
        """
        self._offered -= 1
        if self.leader is not None:
            self._guarded(None, Leader.take_offer)
        return False

    # -- ranks ------------------------------------------------------------------------------

    def _decide(self, decide: Callable[[Leader], Order]) -> Order:
        """Return the leader's order for this point of the schedule, on every rank.

        The leader sends one whatever fails, because the other ranks wait for it. Blocks on these,
        and raises there as `Follower.next_order` does.
        """
        assert self._parts is not None
        if self._parts.follower is not None:
            return self._parts.follower.next_order()
        order = Order() if self._stopped else self._guarded(Order(), decide)
        links = self._parts.links

        def send() -> Order:
            links.send(order)
            return order

        def send_nothing() -> Order:
            links.send(nothing)
            return nothing

        nothing = Order()
        sent = Guard(self._stop_leader).run("the order to the ranks", send, None, send_nothing)
        if sent is None and self._parts.served.rank.ranks > 1:
            raise RankLostError("the leading rank can send no orders to the others")
        return sent or nothing

    def _guarded(self, neutral: _T, decide: Callable[[Leader], _T]) -> _T:
        """Call ``decide`` without raising, where more is to be done after it.

        On an error logs it, stops kvcore until the engine restarts, and returns ``neutral``.
        """
        leader = self.leader
        assert leader is not None
        return Guard(self._stop_leader).run("the leader", lambda: decide(leader), neutral)

    def _stop_leader(self, why: str, error: BaseException | None = None) -> None:
        self._stopped = self._stopped or why
        if self.leader is not None:
            self.leader.disable(why, error)

    def _failed(self, name: str, error: Exception, args: tuple[Any, ...]) -> Any:
        """Stop kvcore after an error in one of SGLang's calls; return None.

        Raises PagesInUse if copies may still touch the engine's pages, and RankLostError if other
        ranks may wait for what the call did not do.
        """
        why = f"an error in {name}"
        attempt("the stop of kvcore", lambda: self._stop(why, error), None)
        if name in _MEETS and self._parts is not None and self._parts.served.rank.ranks > 1:
            raise RankLostError(f"this rank may be out of step with the others: {why}") from error
        if name in _COPIES and self.layer_done_counter is not None:
            try:
                self.layer_done_counter.halt(why, error)
            except EngineMustEnd:
                raise
            except Exception as second:
                raise PagesInUse(
                    f"it is not known whether copies have ended after {why}"
                ) from second
        return None

    def stop(self, why: str, error: BaseException | None = None) -> None:
        """Find, load and save nothing until the engine restarts. What was planned fails.

        ``error`` is logged with its trace. Does not block.
        """
        self._stop(why, error)

    def _stop(self, why: str, error: BaseException | None) -> None:
        self._stopped = self._stopped or why
        self._spoilt = bool(self._queued)
        offers, self._inserting = self._inserting or [], None
        for offer in offers:
            offer.open = False
        if self.leader is not None:
            self.leader.disable(why, error)
        else:
            _log.error("%s: kvcore stands aside on this rank", why, exc_info=error)

    # -- lifecycle --------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any] | None:
        """The state of kvcore as plain data; None on ranks that do not lead."""
        return None if self.leader is None else self.leader.state

    def weights_changed(self) -> None:
        """Stop finding the KV kept so far: weights are about to change in place.

        Called between batches. A flush may follow, at once or later.
        """
        self._changed = True
        if self.leader is not None:
            self.leader.renew()

    def reset(self) -> None:
        """Drop every request, because the engine's cache is flushed.

        Without ``sglang.keep_on_flush``, every block of every tier is dropped too; writes to a disk
        or a store go on, and their blocks are dropped with the rest. If weights may have changed,
        what is kept is not found any more. Blocks up to `LAND_S` for copies of the engine's pages,
        which belong to others afterwards.
        """
        parts = self._parts
        attempt("the end of batches", self.layer_done_counter.reset, None)
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._offered, self._spoilt = 0, False
        if parts is None:
            return
        landed = attempt(
            "the wait for copies", lambda: parts.worker.quiesce(LAND_S), otherwise=False
        )
        word = "" if landed else "copies of pages did not end when the cache was flushed"
        problem = first_problem(parts.served.rank, word)
        if self.leader is None:
            return
        if problem:
            self.leader.disable(problem)
        self._guarded(None, self._forget)
        self._changed = False

    def _forget(self, leader: Leader) -> None:
        """Forget requests, and the KV that must not be found any more."""
        leader.forget_requests()
        if not self._config.sglang.keep_on_flush:
            leader.clear()
        elif self._changed or (
            not hooks.fit(hooks.WEIGHT_HOOKS) and self._config.namespace.weights_change != "never"
        ):
            # What was computed since the change may mix both weights, so the mark is drawn anew.
            leader.renew()

    def close(self) -> None:
        """Finish the saves in flight and flush the tiers, so that no save is lost. Blocks."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.close()
