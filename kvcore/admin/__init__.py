"""What operators do while kvcore runs: one implementation for a server and for an engine's leader.

kvcore ctl ──command──▶ server's loop ──────┐
                    or  Endpoint (socket) ──┴▶ Admin ──▶ KVManager, Tenants
                                                  └──────▶ AuditLog, metrics

commands    what can be asked for, and of which blocks
selection   which blocks of an index a command means
operations  `Admin`: carries commands out over a manager
pins        prompts that an operator pinned
queries     what each tier holds, of whom, under which quota
jobs        commands that move bytes
tenants     names for namespaces, and their quotas
audit       the record of who did what
messages    commands and their results on the wire
endpoint    the socket of an engine that has its own tiers
open        `Admin` and `Endpoint` from settings
"""
