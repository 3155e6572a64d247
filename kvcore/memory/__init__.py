"""Where bytes lie and how they are copied: layouts, arenas, copies and checksums."""
