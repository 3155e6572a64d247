"""Computed rows of K and V, written to pages at their slots."""
