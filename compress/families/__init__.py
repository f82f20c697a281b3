"""Families of models: one file a family, found by its name, which holds what is known
of it and imports no library.

from compress import families

families.find("modernbert").rotary
"""

from compress.families.lookup import find, known, names

__all__ = ["find", "known", "names"]
