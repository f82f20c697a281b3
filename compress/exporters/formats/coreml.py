"""Core ML packages, for iPhones, iPads and Macs."""

from compress.exporters.formats.format import Extra, Format

FORMAT = Format(
    name="coreml",
    files="`.mlpackage`",
    shapes="one row, the lengths of `--seq`",
    needs="`compress-kit[coreml]`",
    precisions=("fp32", "fp16", "w8", "p6", "p4"),
    default=("fp16", "w8"),
    writer="compress.exporters.writers.apple.write_coreml",
    reader="compress.exporters.writers.apple.open_coreml",
    suffixes=(".mlpackage",),
    extra=Extra("coreml", "compress export --for coreml"),
    library="coreml",
    snippets=("coreml.swift",),
    race="runs on Apple's systems only",
    fixed_length=True,
)
