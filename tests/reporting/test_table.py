"""The terminal table: fits, says what it left out, and takes no name for markup."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from compress.records.run_report import Report
from compress.reporting.format import short_names
from compress.reporting.remarks import run_warnings
from compress.reporting.tables import run_table
from compress.reporting.terminal import print_table, to_terminal
from tests.reporting.sample import ROWS, latency, regression, report, with_classes


def printed(whole: Report, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(to_terminal(run_table(whole), width, more="on the page"))
    return console.export_text().replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("width", [60, 140])
def test_fits_without_cutting_a_cell(width: int) -> None:
    text = printed(report(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for name in ("majority", "bag of words", "teacher", "student fp32", "student int8"):
        assert any(line.startswith(name) for line in text.splitlines())


def test_a_wide_terminal_shows_every_column() -> None:
    text = printed(report(), 140)
    assert "more columns" not in text
    row = next(line for line in text.splitlines() if line.startswith("student int8"))
    assert " ".join(row.split()) == "student int8 0.873 97.0 % 95.5 % 14.0 M 9.50 M 14.4 3.00 3.30 180 8 min 34 s 433"


def test_the_caption_says_where_the_other_columns_are() -> None:
    text = " ".join(printed(report(), 80).split())
    assert "more columns: on the page" in text
    assert "samples / s" not in text


def test_wide_prints_every_column_on_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Console(width=60), run_table(report()), wide=True)
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("student int8"))
    assert len(row.split()) == 20, "all of it on one line"


def test_short_names_leave_out_the_shared_folders() -> None:
    paths = ["/a/b/one/bundle:int8", "/a/b/one/bundle:fp32", "/a/b/two/bundle:int8"]
    assert list(short_names(paths).values()) == ["one/bundle:int8", "one/bundle:fp32", "two/bundle:int8"]
    assert short_names(["runs/x.onnx"]) == {"runs/x.onnx": "x.onnx"}
    assert short_names([]) == {}


def test_a_missing_value_is_a_dash_and_an_empty_column_absent() -> None:
    text = printed(report(rows=tuple(replace(row, peak_rss_mb=None) for row in ROWS)), 140)
    assert "peak" not in text
    assert next(line for line in text.splitlines() if line.startswith("majority")).count("—") == 9


def test_metric_and_setting_are_named() -> None:
    text = " ".join(printed(regression(), 100).split())
    assert "Pearson correlation on validation, 872 rows; latency of one forward: 1 thread, batch 1, 128 tokens" in text
    assert "0.800" in text


def test_noisy_times_are_flagged() -> None:
    rows = (*ROWS[:4], replace(ROWS[4], latency=latency(3.0, noisy=True)))
    text = printed(report(rows=rows, noise="load average 3.9"), 100)
    assert "~3.00" in text and "~6.00" not in text
    words = " ".join(text.split())
    assert "~ approximate, other work ran while timing: see the page" in words
    assert "load average 3.9" not in words, "the page says what disturbed the times"


def test_names_are_not_markup() -> None:
    rows = (*ROWS[:4], replace(ROWS[4], name="[red]odd[/red]"))
    text = printed(report(rows=rows, title="[bold]title[/bold]"), 100)
    assert "[red]odd[/red]" in text and "[bold]title[/bold]" in text


def test_a_long_name_is_folded() -> None:
    text = printed(report(rows=(*ROWS[:4], replace(ROWS[4], name="x" * 200))), 80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("x") >= 200


def test_no_rows() -> None:
    assert "a run" in printed(report(rows=()), 80)


def test_numbers_that_are_farther_off_are_shown_and_said() -> None:
    """A correlation of 99 % of the teacher's hides an error that has doubled."""
    whole = regression()
    teacher = replace(whole.rows[2], score={"pearson": 0.86, "mse": 0.36})

    def told(mse: float) -> tuple[str, list[str]]:
        student = replace(whole.rows[3], score={"pearson": 0.855, "mse": mse})
        found = replace(whole, rows=(*whole.rows[:2], teacher, student))
        return printed(found, 160), [each for each in run_warnings(found) if "root mean squared" in each]

    table, warnings = told(0.72)
    assert "RMSE" in table and "0.849" in table
    (warning,) = warnings
    assert warning.startswith("Student is off by 0.849, the teacher by 0.600 (root mean squared error)")
    assert told(0.40)[1] == []
    assert "RMSE" not in printed(report(), 160)


@pytest.mark.parametrize(("support", "said"), [(9, "rare classes"), (100, "single classes")])
def test_half_of_the_rows_are_no_rare_class(support: int, said: str) -> None:
    whole = with_classes(report())
    rows = (
        replace(row, classes=(*row.classes[:1], replace(row.classes[1], support=support))) if row.classes else row
        for row in whole.rows
    )
    (found,) = [each for each in run_warnings(replace(whole, rows=tuple(rows))) if "macro F1" in each]
    assert f"loses on {said}, which" in found
