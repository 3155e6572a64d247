"""Drives vLLM for kvcore's tests and benchmarks."""
