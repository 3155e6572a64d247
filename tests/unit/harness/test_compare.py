"""What the demo asks of an engine, in each engine's own words."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.config import load_config
from kvcore.harness.compare import ENGINES, engine_arguments, keep_on_reset


def test_sizes_are_told_in_each_engines_words() -> None:
    asked: dict[str, Any] = {"dtype": "float32", "request_tokens": 900}
    asked |= {"cached_tokens": 2000, "token_nbytes": 512}
    vllm = {"dtype": "float32", "max_model_len": 900, "kv_cache_memory_bytes": 2000 * 512}
    assert engine_arguments("vllm", **asked) == vllm
    assert engine_arguments("vllm", **asked, batch_tokens=1024) == {
        **vllm,
        "max_num_batched_tokens": 1024,
    }
    assert engine_arguments("sglang", **asked, batch_tokens=1024) == {
        "dtype": "float32",
        "context_length": 900,
        "chunked_prefill_size": 1024,
        "max_total_tokens": 2000,
        "random_seed": 0,
        "start_method": "fork",
    }
    assert "chunked_prefill_size" not in engine_arguments("sglang", **asked)


@pytest.mark.parametrize("engine", ENGINES)
def test_settings_that_survive_a_flush_are_settings(engine: str) -> None:
    given: dict[str, Any] = {
        "sglang": {"prefetch": "wait", "keep_on_flush": False},
        "host": {"capacity": "1GiB"},
    }
    config = load_config(overrides=keep_on_reset(engine, given), env={})
    assert config.sglang.keep_on_flush == (engine == "sglang")
    assert config.sglang.prefetch == "wait"
