"""Blocks of other nodes' memory, read over NIXL: no store between them.

owner                                          reader
put ──▶ LentMemory ◀── PeerServer ◀─ messages ─▶ Peers ◀── PeerStore.get
          │   where, for how long                          │
          ▼                                                ▼
     its memory ════════════════ NIXL READ ════════▶ a lane of its own
"""
