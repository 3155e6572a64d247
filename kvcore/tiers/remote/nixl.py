"""NIXL as kvcore drives it, whatever it moves bytes between: an agent with one backend.

Needs NIXL (``pip install nixl-cu13``, which runs without a GPU too).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvcore.errors import TierUnavailable
from kvcore.tiers.pages import Pages
from kvcore.tiers.remote.options import client_module

LANE_NBYTES = 16 << 20
"""Bytes of a lane, registered memory that transfers of a call go to and come from. Only those that
are used are ever touched."""
DONE, RUNNING = "DONE", "PROC"

_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
_POLL_S = (0.0002, 0.005)


def nixl_module() -> Any:
    """NIXL's Python interface. Raises UnsupportedError where it is not installed."""
    found = [name for name in _PACKAGES if importlib.util.find_spec(name) is not None]
    return client_module(f"{found[0] if found else _PACKAGES[0]}._api", "nixl-cu13")


def pauses() -> Iterator[float]:
    """Seconds to wait between two looks at a transfer."""
    pause, longest = _POLL_S
    while True:
        yield pause
        pause = min(2 * pause, longest)


class NixlAgent:
    """``_agent`` is NIXL's, with ``backend`` alone; ``_errors`` is all that it raises.

    NIXL's own thread, which never rests, is not used: a transfer gets on when it is looked at.
    """

    def __init__(self, name: str, backend: str, advice: str) -> None:
        """``advice`` says what to change where there is no such backend. Raises UnsupportedError
        without NIXL, TierUnavailable without its backend."""
        api = nixl_module()
        self.name = name
        self._errors = _errors_of(api)
        # RuntimeError: where it finds no plugin.
        starting: tuple[type[Exception], ...] = (*self._errors, RuntimeError)
        try:
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=[backend])
            self._agent = api.nixl_agent(name, settings)
        except starting as error:
            raise TierUnavailable(
                f"NIXL's backend {backend} does not start ({say(error)}): {advice}"
            ) from error
        if backend not in self._agent.backends:
            raise TierUnavailable(f"NIXL has no backend {backend!r}: {advice}")

    def _register(self, memory: Pages) -> None:
        self._agent.register_memory([(memory.address, memory.view.nbytes, 0, "")], "DRAM")

    def _state(self, handle: Any, *, post: bool = False) -> str:
        """What has become of a transfer, in NIXL's words or an error's."""
        agent = self._agent
        try:
            return str(agent.transfer(handle) if post else agent.check_xfer_state(handle))
        except self._errors as error:
            return say(error)

    def _release(self, handle: Any) -> None:
        """Of a transfer that has ended: NIXL does not wait for those that run."""
        with suppress(*self._errors):
            self._agent.release_xfer_handle(handle)


def say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _errors_of(api: Any) -> tuple[type[Exception], ...]:
    """Every error NIXL raises; they have no base of their own."""
    kinds = [kind for kind in vars(api.nixlBind).values() if isinstance(kind, type)]
    return tuple(kind for kind in kinds if issubclass(kind, Exception))
