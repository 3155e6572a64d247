"""kvcore: tiered KV-cache offload and selective recomputation for LLM serving engines."""

from __future__ import annotations

__version__ = "0.1.0"
