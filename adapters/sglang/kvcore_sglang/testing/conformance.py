"""SGLang for the conformance kit: the real engine in a process of its own.

This module imports no SGLang; the child process does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from kvcore.harness.compare import SMALL_SGLANG
from kvcore.testing.conformance.driver import Capability, Driver, Setup
from kvcore.testing.conformance.process import ProcessDriver, ProcessEngine

PAGE_TOKENS = 32
"""But one where requests are blended: a blend ends at a page's border, and the oracle with which
the kit compares it knows no pages."""
PATIENT_S = 600.0
"""How long a lookup waits for what is on its way, where a case does not say: however slow the
machine is, what is found is certain."""


class SglangDriver(ProcessDriver):
    name: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"
    restarts: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability) - {
        Capability.LORA,
        Capability.STAGES,
    }
    engine_args: ClassVar[Mapping[str, Any]] = SMALL_SGLANG
    environment: ClassVar[Mapping[str, str]] = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
    """Requests are let in as if answers had one token: otherwise as many as will fit for certain,
    and none is ever retracted."""

    def settings(self, kvcore: Mapping[str, Any]) -> dict[str, Any]:
        waiting = {"prefetch": "wait", "prefetch_timeout_s": PATIENT_S}
        return {
            **kvcore,
            "transfer": {"load_deadline_s": PATIENT_S, **kvcore.get("transfer", {})},
            "sglang": {"min_load_tokens": 1, "keep_on_flush": True, **waiting},
        }

    def arguments(self, setup: Setup) -> dict[str, Any]:
        blends = setup.kvcore is not None and "fusion" in setup.kvcore
        made: dict[str, Any] = {
            "page_size": 1 if blends else PAGE_TOKENS,
            "disable_radix_cache": setup.kvcore is None,
            "tp_size": setup.ranks,
        }
        if setup.step_tokens is not None:
            made["chunked_prefill_size"] = setup.step_tokens
        if setup.memory_tokens is not None:
            made["max_total_tokens"] = setup.memory_tokens
            made["context_length"] = setup.memory_tokens - PAGE_TOKENS
        return made

    def preemptions(self, engine: ProcessEngine) -> int:
        """SGLang says so in its log."""
        return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", engine.log)))

    def stores(self, tokens: int) -> int:
        """Whole pages: that is what the tree of prefixes has."""
        return tokens // PAGE_TOKENS * PAGE_TOKENS

    def reuses(self, prompt: int, stored: int, block: int) -> int:
        """SGLang looks up all tokens but the last, and takes whole pages."""
        found = min(stored, self.looks_up(prompt)) // block * block
        return found // PAGE_TOKENS * PAGE_TOKENS

    def looks_up(self, prompt: int) -> int:
        return prompt - 1


def driver() -> Driver:
    return SglangDriver()
