"""What operators do while kvcore runs: one implementation, for a server and for an engine's leader.

kvcore ctl ──order──▶ server's loop ────────┐
                  or  Endpoint (own socket) ┴▶ Control ──▶ KVManager, Tenants
                                                  └──────▶ AuditLog, metrics

orders      what can be asked for, and of which blocks
tenants     who has a name, and what it may keep
operations  the orders, carried out over a manager
audit       the record of who did what
endpoint    the socket of an engine with tiers of its own
"""
