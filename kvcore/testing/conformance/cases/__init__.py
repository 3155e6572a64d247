"""The conformance cases, one module per section. Importing this package registers all of them."""

from kvcore.testing.conformance.cases import accounting, crossing, equality, faults, fusion

__all__ = ["accounting", "crossing", "equality", "faults", "fusion"]
