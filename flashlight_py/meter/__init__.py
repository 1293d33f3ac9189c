"""Meters: what is gathered while a model trains, alone or summed over processes."""

from __future__ import annotations

from flashlight_py.meter.average_value import AverageValueMeter
from flashlight_py.meter.count import CountMeter
from flashlight_py.meter.meter import Meter
from flashlight_py.meter.mse import MSEMeter
from flashlight_py.meter.time_meter import TimeMeter
from flashlight_py.meter.top_k import TopKMeter

__all__ = ["Meter", "AverageValueMeter", "TimeMeter", "TopKMeter", "CountMeter", "MSEMeter"]
