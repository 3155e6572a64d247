"""The cases, a module a section. Importing this registers all of them."""

from kvcore.testing.conformance.cases import accounting, crossing, equality, faults, fusion

__all__ = ["accounting", "crossing", "equality", "faults", "fusion"]
