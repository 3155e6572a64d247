"""The copy with K rotated on the way: RoPE moved by a distance of its own for every unit."""
