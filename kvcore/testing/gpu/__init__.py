"""A GPU that is not there, for tests: what it would have been asked for."""
