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
"""Tokens of a page, except with fusion, where it is 1: a blend ends at a page's end, and the kit
compares it with an oracle that has no pages."""
PATIENT_S = 600.0
"""Seconds that a lookup waits for blocks that are being read, unless a case says otherwise. Long
enough that the result does not depend on the machine's speed."""


class SglangDriver(ProcessDriver):
    """SGLang in a process of its own."""

    name: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"
    restarts: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability) - {
        Capability.LORA,
        Capability.STAGES,
    }
    engine_args: ClassVar[Mapping[str, Any]] = SMALL_SGLANG
    environment: ClassVar[Mapping[str, str]] = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
    """The environment in which SGLang admits requests as if their answers had one token. By default
    it admits only as many as are sure to fit, and never retracts one."""

    def settings(self, kvcore: Mapping[str, Any]) -> dict[str, Any]:
        """Return kvcore's settings for this engine."""
        waiting = {"prefetch": "wait", "prefetch_timeout_s": PATIENT_S}
        return {
            **kvcore,
            "transfer": {"load_deadline_s": PATIENT_S, **kvcore.get("transfer", {})},
            "sglang": {"min_load_tokens": 1, "keep_on_flush": True, **waiting},
        }

    def arguments(self, setup: Setup) -> dict[str, Any]:
        """Return the engine's arguments for a setup."""
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
        """Return how many requests were retracted, according to SGLang's log."""
        return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", engine.log)))

    def stores(self, tokens: int) -> int:
        """Return the tokens of whole pages, which is what SGLang's prefix tree holds."""
        return tokens // PAGE_TOKENS * PAGE_TOKENS

    def reuses(self, prompt: int, stored: int, block: int) -> int:
        """Return the tokens found of a prompt: whole blocks and pages, without the last token."""
        found = min(stored, self.looks_up(prompt)) // block * block
        return found // PAGE_TOKENS * PAGE_TOKENS

    def looks_up(self, prompt: int, held: int = 0) -> int:
        """Return how many tokens of a prompt SGLang looks up: never the last, nor less than a page.

        It does not ask at all about the rest of a prompt that fills no page.
        """
        asked = super().looks_up(prompt, held) - 1
        return asked if asked >= PAGE_TOKENS else 0


def driver() -> Driver:
    """Return the driver for the conformance kit."""
    return SglangDriver()
