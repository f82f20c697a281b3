"""Formats to export: one file a format, found by its name, which holds what is known of
it and imports no library.

from compress.exporters import formats

formats.find("openvino").precisions
"""

from compress.exporters.formats.lookup import find, known, load, names

__all__ = ["find", "known", "load", "names"]
