"""A GPU that is not there: it queues, reorders and records, and finds what has no order.

`counting` counts what torch code would ask of a GPU. See docs/gpu-testing.md.
"""

from kvcore.testing.gpu.device import RecordingDevice
from kvcore.testing.gpu.hosts import installed
from kvcore.testing.gpu.machine import Fault, Machine
from kvcore.testing.gpu.manual import ManualMachine
from kvcore.testing.gpu.ops import RecordingOps
from kvcore.testing.gpu.queued import queued_torch
from kvcore.testing.gpu.rank import SHAPE, GpuRank

__all__ = [
    "SHAPE", "Fault", "GpuRank", "Machine", "ManualMachine", "RecordingDevice", "RecordingOps",
    "installed", "queued_torch",
]  # fmt: skip
