"""Drives a real engine in a child process, for benchmarks, the demo and the conformance kit."""
