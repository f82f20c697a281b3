"""The log of a run, read as its readers read it."""

from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerControl, TrainerState, TrainingArguments

from compress.training.logging import Journal, curves, forget_after, mend
from compress.training.schedule import AutoLength, Length


def test_tensorboard_has_the_values_of_the_log(tmp_path: Path) -> None:
    journal = Journal("lesson", tmp_path / "log.jsonl", tmp_path / "tensorboard", Console(quiet=True), batch=8)
    arguments, control = TrainingArguments(output_dir=str(tmp_path), report_to=[]), TrainerControl()
    for step, loss in ((1, 0.5), (3, 0.25)):
        journal.on_log(arguments, TrainerState(global_step=step), control, logs={"loss": loss, "bert.labels": 2 * loss})
    journal.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard" / "lesson")).Reload()
    assert shown.Tags()["scalars"] == ["loss", "bert.labels"]
    assert [(each.step, each.value) for each in shown.Scalars("loss")] == [(1, 0.5), (3, 0.25)]
    assert curves(tmp_path / "log.jsonl") == {
        "lesson": [{"step": 1, "loss": 0.5, "bert.labels": 1.0}, {"step": 3, "loss": 0.25, "bert.labels": 0.5}]
    }


def test_a_stage_of_open_length_takes_at_most_its_most_steps(tmp_path: Path) -> None:
    length = AutoLength(Length(least=10, most=40, every=5), None, tmp_path / "limit.json")
    journal = Journal("lesson", tmp_path / "log.jsonl", tmp_path / "tb", Console(quiet=True), batch=8, length=length)
    arguments, control = TrainingArguments(output_dir=str(tmp_path)), TrainerControl()
    state = TrainerState(max_steps=40)
    journal.on_train_begin(arguments, state, control)
    assert journal.bar is not None
    found = []
    for step, start in ((5, None), (29, None), (30, None), (29, 20)):
        state.global_step, length.start = step, start
        journal.on_step_end(arguments, state, control)
        found.append(journal.bar.at_most)
    assert found == [True, True, False, False]
    journal.close()


LINES = ('{"stage": "a", "step": 1, "loss": 0.5}', '{"stage": "a", "step": 2, "loss": 0.25}')


@pytest.mark.parametrize(
    "damaged",
    ["{}", '{"stage": "a" "step": 1}', '{"stage": "a", "step": 1, "loss": "x"}', "\0" * 9, "[" * 20_000, "\udcff"],
)
def test_a_damaged_line_is_dropped_with_a_warning(tmp_path: Path, damaged: str) -> None:
    log, warnings = tmp_path / "log.jsonl", list[str]()
    log.write_bytes("\n".join([LINES[0], damaged, LINES[1], ""]).encode("utf-8", "surrogateescape"))
    assert curves(log) == {"a": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]}
    mend(log, warnings.append)
    assert log.read_text(encoding="utf-8").splitlines() == list(LINES)
    (warning,) = warnings
    assert str(log) in warning
    assert "line 2 " in warning
    mend(log, warnings.append)
    assert len(warnings) == 1


def test_a_line_torn_by_a_kill_is_dropped_silently(tmp_path: Path) -> None:
    log, warnings = tmp_path / "log.jsonl", list[str]()
    log.write_text(f"{LINES[0]}\n{LINES[1][:20]}", encoding="utf-8")
    forget_after(log, "a", 1, warnings.append)
    assert log.read_text(encoding="utf-8") == f"{LINES[0]}\n"
    assert not warnings


def test_a_log_behind_its_checkpoint_gives_a_warning(tmp_path: Path) -> None:
    warnings = list[str]()
    forget_after(tmp_path / "log.jsonl", "a", 0, warnings.append)
    assert not warnings
    for content in (None, "", f"{LINES[0]}\n".replace('"a"', '"b"')):
        if content is not None:
            (tmp_path / "log.jsonl").write_text(content, encoding="utf-8")
        forget_after(tmp_path / "log.jsonl", "a", 4, warnings.append)
    assert len(warnings) == 3
    assert "4 steps of stage a" in warnings[0]
