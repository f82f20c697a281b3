"""Latencies of devices that are not there."""

from compress.records.latency import Latency, Setting


def steady(name: str, setting: Setting, ms: float) -> Latency:
    """Every run takes as long as every other."""
    return Latency(name, setting, 4, ms, ms, ms, ms, 1.0, 1.0, None, False, "", (ms, ms), (ms, ms))
