"""KV packed to fp8 (e4m3) or int8 with a scale for every block, plane and head, and unpacked."""
