"""The composition root: builds the manager, workers and tiers of a process from its settings.

build        the manager and the workers
tiers        backing tiers
page_store   an engine's own pages in one tier
"""
