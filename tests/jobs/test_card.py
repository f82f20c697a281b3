"""What the fields of a student's card say of the report."""

from dataclasses import replace

import pytest

from compress.config.recipe import Recipe
from compress.jobs.card import NOISY, card_fields
from tests.reporting.bundles import certificate
from tests.reporting.sample import ROWS, latency, report


@pytest.mark.parametrize("noisy", [True, False])
def test_a_noisy_time_is_marked(noisy: bool) -> None:
    times = {at: replace(each, noisy=noisy) for at, each in latency(3.0).items()}
    measured = report(rows=(*ROWS[:4], replace(ROWS[4], latency=times)), noise="int8: passes differ" if noisy else None)
    fields = card_fields(measured, Recipe.load("distilbert"), {})
    (cell,) = (value for name, value in fields["rows"][-1].items() if name.startswith("p50"))
    assert cell == ("~3.00 ms (noisy)" if noisy else "3.00 ms")
    assert (NOISY in fields["measured"]) is noisy


@pytest.mark.parametrize("chose", [True, False])
def test_a_certificate_says_whether_its_rows_chose_the_file(chose: bool) -> None:
    measured = report(certificates=(certificate(0.89, chose=chose),))
    (proof,) = card_fields(measured, Recipe.load("distilbert"), {})["proofs"]
    assert ("872 validation rows, which also chose how int8 is made" in proof) is chose
