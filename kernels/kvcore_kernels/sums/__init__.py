"""Sums of blocks that were read straight into device memory."""
