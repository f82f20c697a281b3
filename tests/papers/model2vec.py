"""Tulkens & van Dongen 2024: no loss; what it makes is in tests/test_static.py."""

from collections.abc import Mapping

from tests.papers.case import Case

CASES: Mapping[str, Case] = {}
