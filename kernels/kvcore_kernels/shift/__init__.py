"""The copy that rotates K: every unit's RoPE is moved by its own distance."""
