"""kvcore: tiered KV-cache offload and selective recomputation for LLM serving engines."""

from __future__ import annotations

from kvcore._util import cpus as _cpus  # noqa: F401 - notes the cores before the engine binds any

__version__ = "0.1.0"
