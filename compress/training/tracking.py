"""Report training to a tracker: MLflow, Trackio or Weights & Biases, through
transformers' callbacks.

Each stage is one run of the tracker, in an experiment or project named after the run's
folder; a resumed stage continues its tracker run. All files are written to the run's
folder, unless the tracker's own settings name another place or a server.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants
from rich.console import Console
from transformers import Trainer
from transformers.integrations.integration_utils import (
    MLflowCallback,
    TrackioCallback,
    WandbCallback,
)

from compress.console import plain_printer, warn
from compress.data.sources import is_reachable
from compress.errors import CompressError
from compress.io import make_folder, write_text
from compress.training.run import Run

TrackerRun = tuple[str, Callable[[bool], object], str]
"""The id of a tracker's run, a function that ends it as a success or a failure, and the
command or address that shows it."""


@contextmanager
def report_to_tracker(
    trainer: Trainer, stage: str, run: Run, console: Console
) -> Iterator[None]:
    """Report what `trainer` logs to the run's tracker in this context.

    Raises CompressError if a tracker that has not tracked this run before cannot start.
    Later failures only lead to a warning, and training continues without it until the
    next stage begins.
    """
    if run.track is None or not run.main:
        yield
        return
    if run.track == "tensorboard":  # the journal always writes it
        console.print(
            f"{stage}: tensorboard --logdir {run.path / 'tensorboard'}",
            markup=False,
            highlight=False,
        )
        yield
        return
    path = run.path.resolve()
    home = next(
        (folder for folder in (path, *path.parents) if (folder / "run.json").is_file()),
        path,
    )
    # for one student of a search, with its folder
    name = "/".join((*path.relative_to(home).parts, stage))
    file = run.stage(stage) / f"{run.track}.txt"
    known = file.read_text(encoding="utf-8") if file.is_file() else None
    begin, callback = TRACKER_CLASSES[run.track]
    arguments: Any = trainer.args
    arguments.project = home.name
    arguments.run_name = name

    def give_up(where: str, error: Exception) -> None:
        warn(
            console,
            f"--track {run.track}: failed at {where} of stage {stage} "
            f"({type(error).__name__}: {error}). Training continues without it, and "
            f"{run.path / 'log.jsonl'} has all numbers. Fix the cause: the next "
            "stage, or the same command with --resume, tries "
            f"again{f'; without {file} as a new run' if file.is_file() else ''}",
        )

    reporter: _Reporter | None = None
    state = random.getstate()  # Trackio draws random numbers when it is imported
    try:
        with redirect_stdout(sys.stderr):  # standard output may be reserved for JSON
            identity, end, where = begin(home, name, known)
            tracked: Any = callback()
            tracked.setup(arguments, trainer.state, trainer.model)
        reporter = _Reporter(tracked, give_up)
    except Exception as error:  # trackers have their own classes
        if next(home.rglob(file.name), None) is None:
            raise CompressError(
                f"--track {run.track}: cannot start the run of stage {stage} "
                f"({type(error).__name__}: {error}). Fix the cause, or leave --track "
                "out"
            ) from error
        give_up("the beginning", error)
    finally:
        random.setstate(state)
    if reporter is None:
        yield
        return
    make_folder(file.parent)
    write_text(file, identity)
    trainer.add_callback(reporter)  # type: ignore[arg-type]  # has the events of a TrainerCallback
    plain_printer(console)(f"{stage}: tracked by {run.track}: {where}")
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        try:
            with redirect_stdout(sys.stderr):
                end(succeeded and not reporter.failed)
        except Exception as error:
            reporter.fail("the end", error)


class _Reporter:
    """Forward the trainer's events to a tracker's callback until one fails, for which
    `give_up` is called once."""

    def __init__(
        self, callback: Any, give_up: Callable[[str, Exception], None]
    ) -> None:
        self.callback = callback
        self.give_up = give_up
        self.failed = False

    def fail(self, where: str, error: Exception) -> None:
        if not self.failed:
            self.give_up(where, error)
        self.failed = True

    def __getattr__(self, event: str) -> Callable[..., None]:
        handle = getattr(self.callback, event)

        def forward(*args: Any, **kwargs: Any) -> None:
            try:
                if not self.failed:
                    handle(*args, **kwargs)
            except Exception as error:
                self.fail(event, error)

        return forward


def _mlflow(home: Path, name: str, known: str | None) -> TrackerRun:
    import mlflow

    place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home / 'mlflow.db'}"
    mlflow.set_tracking_uri(place)
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or home.name)
    tracked = mlflow.start_run(run_id=known, run_name=name)
    where = f"mlflow ui --backend-store-uri {place}"
    return (
        tracked.info.run_id,
        lambda ok: mlflow.end_run("FINISHED" if ok else "FAILED"),
        where,
    )


def _wandb(home: Path, name: str, known: str | None) -> TrackerRun:
    import wandb

    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    mode = os.environ.get("WANDB_MODE")
    if mode is None and (
        constants.HF_HUB_OFFLINE or not wandb.api.api_key or not is_reachable(server)
    ):
        mode = "offline"
    tracked = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "compress",
        group=home.name,
        name=name,
        id=known,
        resume="allow",
        dir=home,
        mode=mode,
        settings=wandb.Settings(silent=True, console="off"),
    )
    where = tracked.url or f"offline; wandb sync {Path(tracked.dir).parent}"
    return tracked.id, lambda ok: tracked.finish(exit_code=0 if ok else 1), where


def _trackio(home: Path, name: str, known: str | None) -> TrackerRun:
    """Set the folder, which Trackio reads when it is imported; its callback starts the
    run, identified by its name."""
    place = os.environ.setdefault("TRACKIO_DIR", str(home / "trackio"))
    import trackio

    def end(ok: bool) -> None:
        if trackio.context_vars.current_run.get() is not None:
            trackio.finish()

    return name, end, f"TRACKIO_DIR={place} trackio show --project {home.name}"


class _Trackio(TrackioCallback):
    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the end to `report_to_tracker`, which also handles errors."""


TRACKER_CLASSES: Final[
    dict[str, tuple[Callable[[Path, str, str | None], TrackerRun], type[Any]]]
] = {
    "mlflow": (_mlflow, MLflowCallback),
    "trackio": (_trackio, _Trackio),
    "wandb": (_wandb, WandbCallback),
}
