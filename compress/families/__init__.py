"""Families of models: one file per family, found by its name, which holds the facts of
the family and imports no library.

from compress import families

families.find("modernbert").rotary
"""

from compress.families.lookup import find, known, names

__all__ = ["find", "known", "names"]
