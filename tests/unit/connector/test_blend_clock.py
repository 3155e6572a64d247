"""The clock of a blend over a device that queues its work."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvcore.connector.blend_clock import BlendClock
from support.manual_device import ManualDevice


def test_the_time_is_the_devices_and_leaves_out_waits() -> None:
    """The device's clock makes one step for each piece of work, records included."""
    device = ManualDevice()
    clock = BlendClock(device)
    for _ in range(5):
        device.compute.launch(lambda: None)
    with clock.waiting():
        for _ in range(100):
            device.compute.launch(lambda: None)
    device.compute.launch(lambda: None)
    assert clock.seconds() is None, "it has not been stopped"
    clock.stop()
    assert clock.seconds() is None, "the device has not come to the end"
    assert not device.host_waits
    device.run()
    records = 2  # the one that begins the wait, and the one that ends the blend
    assert clock.seconds() == 5 + 1 + records


def test_without_waits_all_of_it_counts() -> None:
    device = ManualDevice()
    clock = BlendClock(device)
    device.compute.launch(lambda: None)
    clock.stop()
    device.run()
    assert clock.seconds() == 2
