"""From fp32 to int8: calibration, static and smoothed forms, what stays in float32, and the proof of what was lost."""

from compress.quantize.kept import products_to_keep

__all__ = ["products_to_keep"]
