"""The functions that write the formats of `compress.exporters.formats`, which name them
by their addresses, and the readers of Apple's files."""
