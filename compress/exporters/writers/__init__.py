"""The functions that write the formats of `compress.exporters.formats`, which refer to
them by address, and the readers of Apple's files."""
