"""From fp32 to int8: calibration, static and smoothed forms, what stays in float32, and the proof of what was lost.

products, histogram, calibrate    what a graph multiplies, and the ranges of what it reads on real rows
static, smooth, learned           int8 with ranges known beforehand; easier to quantise; learned in training
judge, mixed, costs               which products stay in float32
certify                           what was lost, on the device, in the file
pipeline                          `compress quantize`
"""
