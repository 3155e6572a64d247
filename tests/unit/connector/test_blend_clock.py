"""The clock of a blend over a device that queues its work."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from kvcore.connector.blend_clock import BlendClock
from kvcore_devtools.gpu import ManualMachine, RecordingDevice
from kvcore_devtools.gpu.machine import STEP_S


def test_the_time_is_the_devices_and_leaves_out_waits() -> None:
    """The device's clock makes one step for each piece of work, records included."""
    machine = ManualMachine()
    clock = BlendClock(RecordingDevice(machine, torch.device("cpu")))
    for _ in range(5):
        machine.launch("work", lambda: None)
    with clock.waiting():
        for _ in range(100):
            machine.launch("work", lambda: None)
    machine.launch("work", lambda: None)
    assert clock.seconds() is None, "it has not been stopped"
    clock.stop()
    assert clock.seconds() is None, "the device has not come to the end"
    assert not machine.waited
    machine.run()
    records = 2  # the one that begins the wait, and the one that ends the blend
    assert clock.seconds() == pytest.approx((5 + 1 + records) * STEP_S)


def test_without_waits_all_of_it_counts() -> None:
    machine = ManualMachine()
    clock = BlendClock(RecordingDevice(machine, torch.device("cpu")))
    machine.launch("work", lambda: None)
    clock.stop()
    machine.run()
    assert clock.seconds() == pytest.approx(2 * STEP_S)
