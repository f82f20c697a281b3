"""The log of a run, read as its readers read it."""

from pathlib import Path

from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerControl, TrainerState, TrainingArguments

from compress.journal import Journal, curves


def test_tensorboard_shows_what_the_log_has(tmp_path: Path) -> None:
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
