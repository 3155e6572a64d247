"""Where bytes are and how they are copied: layouts, arenas, copies and checksums."""
