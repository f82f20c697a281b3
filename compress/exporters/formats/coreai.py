"""Core AI assets, which replace Core ML packages from iOS 27 on."""

from compress.exporters.formats.format import Extra, Format

FORMAT = Format(
    name="coreai",
    files="`.aimodel`",
    shapes="one row, the lengths of `--seq`",
    needs="`compress-kit[coreai]`",
    precisions=("fp32", "fp16", "w8", "p6", "p4"),
    default=("fp16", "w8"),
    writer="compress.exporters.writers.apple.write_coreai",
    reader="compress.exporters.writers.apple.open_coreai",
    suffixes=(".aimodel",),
    extra=Extra(
        "coreai", "compress export --for coreai; give it an environment of its own"
    ),
    library="coreai",
    snippets=("coreai.swift",),
    race="runs on Apple's systems only",
    fixed_length=True,
)
