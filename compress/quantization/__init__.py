"""Quantise from fp32 to int8: calibration, smoothed graphs, what stays in float32, and the proof of what was lost.

The files themselves are written by `compress.exporters.int8`.

calibration                       the ranges of what a graph's products read on real rows
smoothquant                       graphs that are easier to quantise
sensitivity, select    how near int8 is to fp32; which products stay in float32; which way to int8
certify                           what was lost, on the device, in the file
"""
