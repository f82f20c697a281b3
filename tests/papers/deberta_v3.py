"""He, Gao & Chen 2023: its losses are ELECTRA's."""

from collections.abc import Mapping

from tests.papers.case import Case

CASES: Mapping[str, Case] = {}
