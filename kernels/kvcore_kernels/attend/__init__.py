"""Attention of scattered rows over paged KV: a row at position p sees keys 0..p and no other."""
