"""Gather and scatter: KV units between any two layouts, for a range of layers in one launch."""
