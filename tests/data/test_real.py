"""The files people really have, where they are at hand ($COMPRESS_DATA): all load as they are."""

import os
from pathlib import Path

import pytest

from compress.data import TaskData, load_task
from compress.errors import DataError

HERE = Path(os.environ.get("COMPRESS_DATA", Path(__file__).parents[3] / "shared" / "data"))


def loaded(name: str, **options: object) -> TaskData:
    if not (HERE / name).is_dir():
        pytest.skip(f"no {name} in {HERE}: set COMPRESS_DATA")
    return load_task(str(HERE / name), **options)  # type: ignore[arg-type]


def sizes(data: TaskData) -> tuple[int, int, int | None]:
    return len(data.train), len(data.validation), None if data.test is None else len(data.test)


def test_sst2() -> None:
    data = loaded("sst2")
    assert sizes(data) == (60_614, 6_735, 872)
    assert sum(data.train["label"][:]) == 33_828
    (shared,) = data.notes
    assert shared.startswith("75 of 6,735 rows of validation (1.1%) are in train too")


def test_rte() -> None:
    data = loaded("rte")
    assert sizes(data) == (2_127, 363, 277)
    assert (data.task.pair, data.task.labels) == (True, ("entailment", "not_entailment"))
    assert len(data.notes) == 3


def test_mrpc_of_glue_and_of_msr() -> None:
    glue, msr = loaded("mrpc/glue"), loaded("mrpc/msr")
    assert glue.task.text == msr.task.text == ("#1 String", "#2 String")
    assert (sizes(glue), sizes(msr)) == ((3_668, 408, None), (3_669, 407, 1_725))
    assert sum(glue.train["label"][:]) == 2_474
    assert msr.test is not None
    assert sum(msr.test["label"][:]) == 1_147


def test_stsb_of_glue() -> None:
    data = loaded("stsb/glue")
    assert sizes(data) == (5_749, 1_500, None)
    assert (data.task.kind, data.task.metric) == ("regression", "pearson")
    assert sum(data.train["label"][:]) / 5_749 == pytest.approx(2.70, abs=0.01)


def test_stsb_original_by_column_numbers() -> None:
    data, glue = loaded("stsb/original", text=["6", "7"], label="5"), loaded("stsb/glue")
    assert sizes(data) == (5_749, 1_500, 1_379)
    assert data.train["label"][:] == glue.train["label"][:]


def test_squad2_and_mlqa() -> None:
    half, mlqa = HERE / "squad2_half_dev" / "dev-v2.0.json", HERE / "mlqa_en_dev" / "dev-context-en-question-en.json"
    if not (half.is_file() and mlqa.is_file()):
        pytest.skip(f"no squad2_half_dev and mlqa_en_dev in {HERE}: set COMPRESS_DATA")
    data = load_task(f"train={half},test={mlqa}")
    assert sizes(data) == (5_466, 612, 1_148)
    assert (data.task.kind, data.task.unanswerable) == ("qa", True)
    assert sum(bool(answers) for split in (data.train, data.validation) for answers in split["answers"]) == 2_910
    with pytest.raises(DataError, match="no training split"):
        load_task(str(half.parent))


def test_wnut17_as_it_comes() -> None:
    data = loaded("wnut17")
    assert sizes(data) == (3_394, 1_009, 1_287)
    assert len(data.task.labels) == 1 + 2 * 6
    assert data.test is not None
    begins = [n for n, label in enumerate(data.task.labels) if label.startswith("B-")]
    assert sum(tag in begins for tags in data.test["tags"] for tag in tags) == 1_079
    assert data.notes == ()
