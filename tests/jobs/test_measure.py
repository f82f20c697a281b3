"""A report says so where the rows that it scores on have decided something."""

from dataclasses import replace
from pathlib import Path

from compress.data import load_task
from compress.jobs.measure import note_split
from tests import tiny


def test_scores_on_rows_that_decided_are_said_to_be(tmp_path: Path, home: Path) -> None:
    """Importance reads the validation rows (tests/training/test_teachers.py), and never those of the test split."""
    data = load_task(tiny.reviews(tmp_path / "data"))
    assert data.test is None
    assert len(note_split(data)) == 1
    assert note_split(replace(data, test=data.validation.select(range(8)))) == []
