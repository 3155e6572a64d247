"""Helpers that know nothing about KV caches."""
