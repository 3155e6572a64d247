"""The squared distance between cached and computed K and V, per row."""
