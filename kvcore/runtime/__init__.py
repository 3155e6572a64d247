"""The composition root: the manager, workers and tiers of a process, built from its settings."""
