"""Hou et al. 2020: no loss of its own; its step and subnets are in test_dynabert.py."""

from collections.abc import Mapping

from tests.papers.case import Case

CASES: Mapping[str, Case] = {}
