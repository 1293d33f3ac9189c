"""Meters: what is gathered while a model trains, alone or summed over processes."""

from __future__ import annotations

from flashlight_py.meter.meter import (
    AverageValueMeter,
    CountMeter,
    Meter,
    MSEMeter,
    TimeMeter,
    TopKMeter,
)

__all__ = ["Meter", "AverageValueMeter", "TimeMeter", "TopKMeter", "CountMeter", "MSEMeter"]
