"""The streams on which copies run: none on a CPU, CUDA streams on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["CudaStream", "Stream"]

_NOTHING = nullcontext()
_MARKS_KEPT = 65536


class Stream:
    """Orders copies with the engine's compute.

    On a CPU the engine's forward has ended before it submits a graph, so there is nothing to order.
    """

    def mark(self, graph_id: int) -> None:
        """Make the graph's copies wait for the engine's work submitted so far."""

    def copying(self, graph_id: int) -> Any:
        """Return a context in which copies are issued; on exit they have ended."""
        return _NOTHING


class CudaStream(Stream):
    """A separate CUDA stream for copies in each thread.

    It waits for the compute stream as of ``mark``.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._streams: dict[int, Any] = {}
        self._marks: dict[int, Any] = {}

    def mark(self, graph_id: int) -> None:
        event = self._torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._torch.cuda.current_stream(self._device))
        self._marks[graph_id] = event
        while len(self._marks) > _MARKS_KEPT:  # ids ascend: the oldest graph ended long ago
            self._marks.pop(next(iter(self._marks)))

    def copying(self, graph_id: int) -> Any:
        return CudaCopying(self, graph_id)

    def enter(self, graph_id: int) -> Any:
        import threading

        torch = self._torch
        thread = threading.get_ident()
        if thread not in self._streams:
            torch.cuda.set_device(self._device)
            self._streams[thread] = torch.cuda.Stream(self._device)
        stream = self._streams[thread]
        if (event := self._marks.get(graph_id)) is not None:
            stream.wait_event(event)
        context = torch.cuda.stream(stream)
        context.__enter__()
        return stream, context


class CudaCopying:
    def __init__(self, owner: CudaStream, graph_id: int) -> None:
        self._owner = owner
        self._graph_id = graph_id

    def __enter__(self) -> None:
        self._stream, self._context = self._owner.enter(self._graph_id)

    def __exit__(self, *exc: object) -> None:
        self._context.__exit__(*exc)
        self._stream.synchronize()
