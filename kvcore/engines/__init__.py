"""What kvcore asks of an engine, and how it finds out whether an installed one has it.

    EngineSpec ── probes ──▶ wants, each looked for in `Sources` ──▶ judge ──▶ Verdict

No module here imports an engine.
"""
