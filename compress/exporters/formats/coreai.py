"""Core AI assets, which replace Core ML packages from iOS 27 on."""

from dataclasses import replace

from compress.exporters.formats import coreml
from compress.exporters.formats.format import Extra

FORMAT = replace(
    coreml.FORMAT,
    name="coreai",
    files="`.aimodel`",
    needs="`compress-kit[coreai]`",
    writer="compress.exporters.writers.apple.write_coreai",
    reader="compress.exporters.writers.apple.open_coreai",
    suffixes=(".aimodel",),
    extra=Extra(
        "coreai", "compress export --for coreai; give it an environment of its own"
    ),
    library="coreai",
    snippets=("coreai.swift",),
)
