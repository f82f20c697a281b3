"""Log a training stage as JSON lines, for TensorBoard, and as progress on the
terminal."""

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from compress.io import flush, name_disk_errors, write_text
from compress.progress import Progress, Say
from compress.training.schedule import AutoLength


def mend(log: Path, warn: Say) -> list[dict[str, Any]]:
    """Remove invalid lines from a log, with a warning unless only the last is
    incomplete; return its entries."""
    if not log.is_file():
        return []
    content = log.read_text(encoding="utf-8", errors="replace")
    lines = content.split("\n")
    torn = lines.pop()  # what follows the end of the last complete line
    entries = {number: _entry(line) for number, line in enumerate(lines, 1)}
    if damaged := [str(number) for number, entry in entries.items() if entry is None]:
        shown = ", ".join(damaged[:10]) + (" and more" if damaged[10:] else "")
        warn(
            f"{log}: is damaged: line {shown} cannot be read. The report's curves lack "
            "these points."
        )
    if damaged or torn:
        write_text(
            log, "".join(f"{line}\n" for at, line in enumerate(lines, 1) if entries[at])
        )
    return [entry for entry in entries.values() if entry is not None]


def forget_after(log: Path, stage: str, step: int, warn: Say) -> None:
    """Remove the entries of `stage` after `step`, which the resumed stage logs
    again."""
    entries = mend(log, warn)
    kept = [
        entry for entry in entries if entry["stage"] != stage or entry["step"] <= step
    ]
    if step and not any(entry["stage"] == stage for entry in kept):
        warn(
            f"{log}: has no entries of the first {step} steps of stage {stage}: its "
            "curves begin after them."
        )
    if len(kept) < len(entries):
        write_text(log, "".join(f"{json.dumps(entry)}\n" for entry in kept))


def _entry(line: str) -> dict[str, Any] | None:
    """Parse a line of the log: the stage, the step, and numbers. Return None if it is
    anything else."""
    try:
        entry = json.loads(line)
        numbers = {name: value for name, value in entry.items() if name != "stage"}
    except (ValueError, AttributeError, RecursionError):
        return None
    valid = all(
        isinstance(value, int | float) for value in numbers.values()
    ) and isinstance(numbers.get("step"), int)
    return entry if valid and isinstance(entry.get("stage"), str) else None


def curves(log: Path) -> dict[str, list[dict[str, float]]]:
    """Return stage name -> logged points in order."""
    stages = dict[str, list[dict[str, float]]]()
    for line in (
        log.read_text(encoding="utf-8", errors="replace").split("\n")
        if log.is_file()
        else []
    ):
        if entry := _entry(line):
            stages.setdefault(entry.pop("stage"), []).append(entry)
    return stages


class Journal(TrainerCallback):
    """Log one stage; used in the main process only."""

    def __init__(
        self,
        stage: str,
        log: Path,
        tensorboard: Path,
        console: Console,
        *,
        batch: int,
        seconds: float | None = None,
        length: AutoLength | None = None,
    ) -> None:
        self.stage = stage
        self.log = log
        self.batch = batch
        self.console = console
        self.length = length
        self.seconds = math.inf if seconds is None else seconds
        self.scalars = _Scalars(tensorboard / stage)
        self.bar: Progress | None = None
        self.facts = dict[str, str]()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self.bar = Progress(
            self.stage,
            state.max_steps,
            "steps",
            console=self.console,
            done=state.global_step,
            always=True,
            seconds=self.seconds,
        )
        self.bar.start()
        self.began = self.bar.clock()
        self.first = state.global_step

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        assert self.bar is not None, "training has begun"
        speed = (
            (state.global_step - self.first)
            * self.batch
            / max(self.bar.clock() - self.began, 1e-9)
        )
        self.bar.facts = {"speed": f"{speed:,.0f} samples/s", **self.facts}
        self.bar.total = state.max_steps
        self.bar.at_most = self.length is not None and self.length.is_open(
            state.global_step
        )
        self.bar.advance(state.global_step - self.bar.done)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        values = {
            name: value
            for name, value in (logs or {}).items()
            if isinstance(value, int | float)
        }
        if "loss" in values:
            self.facts["loss"] = f"loss {values['loss']:.4g}"
        if "eval_score" in values:
            self.facts["score"] = f"score {values['eval_score']:.4f}"
        with name_disk_errors(self.log), self.log.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"stage": self.stage, "step": state.global_step} | values)
                + "\n"
            )
        # a process that resumes from the checkpoint does not log this again
        if control.should_save:
            flush(self.log)
        self.scalars.write(state.global_step, values)

    def close(self) -> None:
        """Stop the bar and restore the cursor, also after an interruption."""
        if self.bar is not None:
            self.bar.stop(ended=sys.exc_info()[0] is None)


class _Scalars:
    """Write a TensorBoard event file. TensorBoard's own writer uses a thread, where a
    full disk ends in a traceback."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{time.time_ns()}"
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        points = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        self._write(
            Event(wall_time=time.time(), step=step, summary=Summary(value=points))
        )

    def _write(self, event: Any) -> None:
        with name_disk_errors(self.path), self.path.open("ab", buffering=0) as file:
            RecordWriter(file).write(event.SerializeToString())
