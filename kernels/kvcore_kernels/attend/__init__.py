"""Attention of scattered rows over paged KV: a row at position p sees only keys 0..p."""
