"""Show training in the tracker of the user's choice: MLflow, Trackio or Weights & Biases, by transformers' callbacks.

A stage is one run there, in an experiment or project named like the folder; a resumed stage continues its own. All
that is written is in the run's folder, unless the tracker's own settings name another place or a server.
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
from transformers.integrations.integration_utils import MLflowCallback, TrackioCallback, WandbCallback

from compress.data.sources import is_reachable
from compress.errors import CompressError
from compress.io import atomic_file, make_folder
from compress.training.run import Run

Begun = tuple[str, Callable[[bool], object], str]
"""The id of a tracker's run, what ends it (told whether all went well), and the command or address that shows it."""


@contextmanager
def report_to_tracker(trainer: Trainer, stage: str, run: Run, console: Console) -> Iterator[None]:
    """Report to the run's tracker what `trainer` logs while this is open. Raises CompressError where none begins."""
    if run.track is None or not run.main:
        yield
        return
    if run.track == "tensorboard":  # the journal writes it, with or without being asked
        console.print(f"{stage}: tensorboard --logdir {run.path / 'tensorboard'}", markup=False, highlight=False)
        yield
        return
    path = run.path.resolve()
    home = next((each for each in (path, *path.parents) if (each / "run.json").is_file()), path)
    name = "/".join((*path.relative_to(home).parts, stage))  # of one student of a search, with its folder
    file = run.stage(stage) / f"{run.track}.txt"
    known = file.read_text(encoding="utf-8") if file.is_file() else None
    begin, callback = TRACKERS[run.track]
    arguments: Any = trainer.args
    arguments.project, arguments.run_name = home.name, name
    drawn = random.getstate()  # Trackio draws from it when it is imported
    with redirect_stdout(sys.stderr):  # standard output may be for JSON alone
        try:
            identity, end, shown = begin(home, name, known)
            reporter: Any = callback()
            reporter.setup(arguments, trainer.state, trainer.model)
        except Exception as error:  # of a tracker's own kinds
            raise CompressError(
                f"--track {run.track}: cannot begin the run of stage {stage} ({type(error).__name__}: {error}). Leave "
                f"--track out, or mend that; without {file} it is a new run there"
            ) from error
    random.setstate(drawn)
    make_folder(file.parent)
    with atomic_file(file) as partial:
        partial.write_text(identity, encoding="utf-8")
    trainer.add_callback(reporter)
    console.print(f"{stage}: tracked by {run.track}: {shown}", markup=False, highlight=False, soft_wrap=True)
    well = False
    try:
        yield
        well = True
    finally:
        with redirect_stdout(sys.stderr):
            end(well)


def _mlflow(home: Path, name: str, known: str | None) -> Begun:
    import mlflow

    place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home / 'mlflow.db'}"
    mlflow.set_tracking_uri(place)
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or home.name)
    begun = mlflow.start_run(run_id=known, run_name=name)
    shown = f"mlflow ui --backend-store-uri {place}"
    return begun.info.run_id, lambda well: mlflow.end_run("FINISHED" if well else "FAILED"), shown


def _wandb(home: Path, name: str, known: str | None) -> Begun:
    import wandb

    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    mode = os.environ.get("WANDB_MODE")
    if mode is None and (constants.HF_HUB_OFFLINE or not wandb.api.api_key or not is_reachable(server)):
        mode = "offline"
    begun = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "compress", group=home.name, name=name, id=known, resume="allow",
        dir=home, mode=mode, settings=wandb.Settings(silent=True, console="off"),
    )  # fmt: skip
    shown = begun.url or f"offline; wandb sync {Path(begun.dir).parent}"
    return begun.id, lambda well: begun.finish(exit_code=0 if well else 1), shown


def _trackio(home: Path, name: str, known: str | None) -> Begun:
    """Choose the place, which is read when it is imported first; its callback begins the run, and knows it by name."""
    place = os.environ.setdefault("TRACKIO_DIR", str(home / "trackio"))
    import trackio

    def end(well: bool) -> None:
        if trackio.context_vars.current_run.get() is not None:
            trackio.finish()

    return name, end, f"TRACKIO_DIR={place} trackio show --project {home.name}"


class _Trackio(TrackioCallback):
    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the end to `report_to_tracker`, which also knows of an end by an error."""


TRACKERS: Final[dict[str, tuple[Callable[[Path, str, str | None], Begun], type[Any]]]] = {
    "mlflow": (_mlflow, MLflowCallback), "trackio": (_trackio, _Trackio), "wandb": (_wandb, WandbCallback),
}  # fmt: skip
