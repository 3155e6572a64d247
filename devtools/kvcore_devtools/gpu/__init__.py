"""A GPU that is not there: it queues, reorders and records, and finds what has no order.

`counting` counts what torch code would ask of a GPU. See docs/gpu-testing.md.
"""

from kvcore_devtools.gpu.device import RecordingDevice
from kvcore_devtools.gpu.hosts import installed
from kvcore_devtools.gpu.machine import Fault, Machine
from kvcore_devtools.gpu.manual import ManualMachine
from kvcore_devtools.gpu.ops import RecordingOps
from kvcore_devtools.gpu.queued import queued_torch
from kvcore_devtools.gpu.rank import SHAPE, GpuRank

__all__ = [
    "SHAPE", "Fault", "GpuRank", "Machine", "ManualMachine", "RecordingDevice", "RecordingOps",
    "installed", "queued_torch",
]  # fmt: skip
