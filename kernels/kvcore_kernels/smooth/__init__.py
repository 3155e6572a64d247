"""Scores averaged over neighbouring rows."""
