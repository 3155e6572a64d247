"""A third party's hooks around attention, as a plugin of its own.

Put this folder on PYTHONPATH and kvcore finds it by its entry point. ``HOOKS`` in a file
``kvcore_wanted.py`` in another folder there names the hooks: ``answer`` computes whole prefills
itself, ``silence`` spoils the last layer's output of decodes, ``fail`` raises at its 10th call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvcore_wanted

from kvcore.plugins import AttentionPlugin, hookimpl

if TYPE_CHECKING:
    from kvcore.model.shape import BlockShape
    from kvcore.plugins.attention import AttentionHook


@hookimpl
def kvcore_attention() -> list[AttentionPlugin]:
    return [AttentionPlugin(name, _maker(name)) for name in kvcore_wanted.HOOKS]


def _maker(name: str) -> Any:
    def make(shape: BlockShape, rank: int) -> AttentionHook:
        """Made when asked for: a plugin's module imports nothing heavy."""
        import kvcore_watching_hooks

        hook: AttentionHook = getattr(kvcore_watching_hooks, name.title())(shape)
        return hook

    return make
