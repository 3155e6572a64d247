"""Helpers that know nothing of KV caches."""
