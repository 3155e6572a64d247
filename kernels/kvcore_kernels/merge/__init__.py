"""Computed rows of K and V into pages, at their slots."""
