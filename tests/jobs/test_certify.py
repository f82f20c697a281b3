"""The rows that the int8 file of a student is certified on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compress.jobs.shipping import Certify, ShipJob
from compress.quantization.certify import ScoreDrop
from compress.quantization.sensitivity import Mixed
from tests import tiny

NEAR = ScoreDrop(1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("tested", [True, False])
def test_the_test_rows_certify_if_there_are_any(tested: bool, tmp_path: Path) -> None:
    folder = Path(tiny.reviews(tmp_path / "data"))
    if tested:
        lines = (folder / "train.tsv").read_text(encoding="utf-8").splitlines()
        (folder / "test.tsv").write_text("\n".join(lines[:61]) + "\n", encoding="utf-8")
    bundle = tiny.bundle(tmp_path / "bundle")
    data = bundle.load_data(str(folder))
    recipe = SimpleNamespace(stages=[SimpleNamespace(length=16)])
    models = SimpleNamespace(context=SimpleNamespace(data=data), recipe=recipe)
    whole: Any = SimpleNamespace(models=models, teacher=SimpleNamespace(tokenizer=tiny.tokenizer()))
    mixed = Mixed((), NEAR, near=True, products=1, whole=NEAR)
    done = Certify(0.5).run(ShipJob(whole, tmp_path, written=bundle, method="dynamic int8", mixed=mixed))
    assert done.proof is not None
    expected = ("test", 60, False) if tested else ("validation", 40, True)
    assert (done.proof.split, done.proof.rows, done.proof.chose) == expected
