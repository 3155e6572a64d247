"""The main job in one command: a real engine, real text, and KV cache that comes back."""
