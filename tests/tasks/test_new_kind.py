"""A kind of task that no file of the package knows runs through every command."""

from pathlib import Path
from typing import Any

import pytest

import compress
from compress import kinds
from compress.exporters.artifact import Bundle
from compress.records.run_report import Report
from tests import command, tiny

RECIPE = tiny.RECIPE.replace("loss: hinton.soft_targets, weight: 0.5, temperature: 2.0", "loss: hinton.matched_logits")


def write(folder: Path) -> str:
    """Write texts that say "good" none to three times, with the number."""
    folder.mkdir()
    for split, rows in (("train", 96), ("dev", 40)):
        lines = [f"{'good ' * (n % 4)}{'film ' * (n % 3)}{'plot'}\t{n % 4}" for n in range(rows)]
        (folder / f"{split}.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n", encoding="utf-8")
    return str(folder)


@pytest.fixture
def bundle(tmp_path: Path, hastened: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    return tiny.call(
        compress.distill,
        teacher=tiny.checkpoint(tmp_path / "teacher"),
        recipe=tiny.recipe(tmp_path, RECIPE),
        data=write(tmp_path / "data"),
        kind="count",
        out=tmp_path / "run",
        precision="fp32",
        gate="warn",
    )


def test_a_new_kind_is_one_new_file(bundle: Bundle, tmp_path: Path) -> None:
    report = Report.from_json(bundle.path / "report.json")
    assert (report.kind, report.metric, report.unit, report.labels) == ("count", "right", "rows", 0)
    assert [row.name for row in report.of_role("baseline")] == ["the median"]
    assert isinstance(Bundle.load(bundle.path).task, kinds.find("count"))
    (answer,) = bundle.predict(["good plot"])
    assert answer.score == int(answer.score)
    told = command.run("predict", str(bundle.path), "good plot")
    assert (told.code, told.out.split("\t")[0]) == (0, f"{answer.score:.4f}")
    smaller = tiny.call(
        compress.quantize, bundle=str(bundle.path), out=tmp_path / "int8", data=str(tmp_path / "data"), max_drop=1.0
    )
    assert smaller.bundle.task == bundle.task
    shown = command.run("report", str(tmp_path / "run"))
    assert shown.code == 0, shown.err
