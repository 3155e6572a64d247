"""Blocks in the memory of other nodes, read over NIXL without a store in between.

owner                                              reader
put ──▶ LentMemory ◀── PeerServer ◀─ messages ─▶ Peers ◀── PeerStore.get
          │   leases: where, for how long                    │
          ▼                                                  ▼
     its memory ═════════════════ NIXL READ ═════════▶ a channel of its own
"""
