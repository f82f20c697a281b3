"""Quantise from fp32 to int8: calibrate, smooth graphs, choose products that stay in
float32, and certify the result.

The files themselves are written by `compress.exporters.int8`.

calibration   ranges of activations on real rows
smoothquant   graphs that are easier to quantise
sensitivity   which products stay in float32
select        which method makes the int8 file
certify       what the file loses, on the device; written into the file
npu           files for neural processors
"""
