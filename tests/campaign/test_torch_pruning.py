"""Every family that the docstring of `torch_pruning` lists is pruned, or refused, as it says."""

from pathlib import Path

import pytest

from tests.campaign import cases
from tests.pruning.test_torch_pruning import REFUSED, WORKING, check_refused, check_working

pytestmark = pytest.mark.skipif(not cases.WHOLE, reason="tests/pruning tries some of them")


@pytest.mark.parametrize("family", WORKING)
def test_a_working_family_is_pruned(family: str, tmp_path: Path) -> None:
    check_working(family, tmp_path)


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused(family: str) -> None:
    check_refused(family)
