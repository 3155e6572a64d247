"""Checksums of blocks that were read directly into device memory."""
