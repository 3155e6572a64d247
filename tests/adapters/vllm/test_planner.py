"""The planner where vLLM asks what can be loaded: obeyed when it knows, silent when not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcore.config import Config, load_config
from kvcore.connector.build import build_planner, build_policy
from kvcore.connector.fusion_policy import FusionPolicy
from kvcore.connector.leader import LeaderParts
from kvcore.connector.step_transport import Outbox
from kvcore.explain.recorder import RequestRecorder
from kvcore.index import BlockIndex, TierSpec
from kvcore.manager import Backing, KVManager
from kvcore.manager.load_advisor import LoadAdvisor, tier_priors
from kvcore.model.keys import KeyChain
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.runtime.build import load_plugins
from kvcore.telemetry.metrics import Metrics, MissReason
from kvcore.telemetry.rates import ComputeRates, ForwardPart, Rates
from kvcore_vllm.leader import Leader

BLOCK, LAYERS = 16, 4
SHAPE = BlockShape(LAYERS, 2, 64, BLOCK, "float16")
MODEL = ModelDescription(SHAPE, (LayerGroup(0, BLOCK, tuple(range(LAYERS))),), b"f" * 32, 1)
PROMPT = list(range(1, 402))
PAGES: Any = SimpleNamespace(get_block_ids=lambda: [np.arange(26).tolist()])


class Side:
    """A scheduler side with ``PROMPT`` on disk, and what it stands on."""

    def __init__(self, planner: bool = True, lookahead: int = 0) -> None:
        self.config = load_config(None, {"planner": {"enabled": planner}})
        self.index = BlockIndex([TierSpec("host", 64), TierSpec("disk", 64)])
        self.outbox, self.metrics = Outbox(1), Metrics("leader")
        self.manager = KVManager(
            self.index, self.outbox, backing=[Backing("disk")], metrics=self.metrics
        )
        compute = ComputeRates(1e-3, 1e-6, 1e-10)
        self.rates = Rates(LAYERS, compute, tier_priors(["host", "disk"]))
        planning = LoadAdvisor(
            self.config, MODEL, self.manager, self.rates, min_load_tokens=64, layerwise=True
        )
        recorder = RequestRecorder()
        recorder.count_in(self.metrics)
        parts = LeaderParts[Any](
            manager=self.manager,
            transport=self.outbox,
            metrics=self.metrics,
            recorder=recorder,
            planning=planning if planner else None,
        )
        self.side = Leader(self.config, MODEL, parts, self.outbox, {}, lookahead=lookahead)
        chain = KeyChain(self.side.namespaces.of(), BLOCK)
        chain.extend(PROMPT)
        made = self.index.lifecycle.reserve("disk", chain.keys, 0, 25, chain.namespace.digest)
        self.index.lifecycle.commit(made)

    def teach(self, load: float) -> None:
        """Every megabyte takes ``load`` seconds, every 100 tokens 10 milliseconds."""
        for n in (1, 2, 3, 4):
            self.rates.prefilled([ForwardPart(100 * n, 0)], n * 0.01)
            for tier in ("host", "disk"):
                self.rates.loaded(tier, n * 1_000_000, n * load)

    def ask(self, computed: int = 0) -> Any:
        return self.side.get_num_new_matched_tokens(request(), computed)

    @property
    def misses(self) -> dict[str, int]:
        return self.metrics.snapshot().get("kvcore_misses_total", {})


def request() -> Any:
    return SimpleNamespace(
        request_id="r",
        num_tokens=len(PROMPT),
        num_prompt_tokens=len(PROMPT),
        prompt_token_ids=PROMPT,
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
        pooling_params=None,
        resumable=False,
        mm_features=[],
        _all_token_ids=PROMPT,
        lora_request=None,
        cache_salt=None,
        kv_transfer_params=None,
    )


@pytest.mark.parametrize("computed", [0, 32, 320, 384])
def test_with_unknown_rates_every_answer_is_the_one_without_a_planner(computed: int) -> None:
    assert Side().ask(computed) == Side(planner=False).ask(computed)
    assert Side().ask()[0] == 400


def test_a_slow_disk_is_a_miss_that_names_the_plan() -> None:
    made = Side()
    made.teach(load=10.0)
    for _ in range(3):
        assert made.ask() == (0, False)
    assert made.misses == {}, "vLLM has not scheduled it"
    made.side.update_state_after_alloc(request(), PAGES, 0)
    assert made.misses == {MissReason.PLANNED.value: 1}


def test_a_fast_disk_is_loaded_as_ever() -> None:
    made = Side()
    made.teach(load=1e-4)
    assert made.ask() == (400, True)
    assert made.misses == {}


@pytest.mark.parametrize("known", [False, True])
def test_a_plan_does_not_load_what_a_draft_needs_computed(known: bool) -> None:
    made = Side(lookahead=3)
    if known:
        made.teach(load=1e-4)
    assert made.ask() == (397, True)


def test_a_load_between_steps_has_the_deadline_of_its_plan() -> None:
    for seconds, expected in ((None, 30.0), (1e-4, 0.25)):
        made = Side()
        if seconds is not None:
            made.teach(load=seconds)
        asked = request()
        external, waits = made.side.get_num_new_matched_tokens(asked, 0)
        assert waits
        assert external is not None
        made.side.update_state_after_alloc(asked, PAGES, external)
        [(_, graph)] = made.side._plan.async_loads
        assert graph.deadline_s == expected


def test_rates_are_kept_where_a_planner_or_fusion_decides_by_them() -> None:
    parts: Any = SimpleNamespace(
        manager=Side().manager,
        metrics=Metrics(enabled=False),
        plugins=load_plugins(load_config(None)),
        read_paths={"host": "h2d", "disk": "disk2h"},
    )

    def policy(config: Config, recorder: RequestRecorder | None = None) -> FusionPolicy | None:
        return build_policy(config, MODEL, parts, hidden=256, device="cpu", recorder=recorder)

    def planner(config: Config, rates: Rates) -> LoadAdvisor | None:
        return build_planner(
            config, MODEL, parts, rates, RequestRecorder(), min_load_tokens=1, layerwise=False
        )

    plain = load_config(None, {"metrics": {"enabled": False}})
    assert policy(plain) is None
    assert policy(plain, RequestRecorder()) is None
    assert policy(load_config(None), RequestRecorder()) is not None  # what loads save is counted
    blends = load_config(None, {"fusion": {"enabled": True}})
    assert policy(blends) is not None
    plans = load_config(None, {"planner": {"enabled": True}})
    pace = policy(plans)
    assert pace is not None
    assert pace.rates.tiers == {"host", "disk"}
    planning = planner(plans, pace.rates)
    assert planning is not None
    assert planning.planner.rates is pace.rates
    assert planner(plain, pace.rates) is None
