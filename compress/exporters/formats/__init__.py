"""Export formats: one file per format, named after it, which holds its facts and
imports no library.

from compress.exporters import formats

formats.find("openvino").precisions
"""

from compress.exporters.formats.lookup import find, known, load, names

__all__ = ["find", "known", "load", "names"]
