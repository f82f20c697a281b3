"""What an export does with real rows: calibrates on some, and races a bundle's files judged by others."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import ExportError
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import Encoder, Shipped, Source, Writer

if TYPE_CHECKING:
    from datasets import Dataset
    from rich.table import Table

    from compress.data.task import TaskData
    from compress.evaluation.evaluator import Exam
    from compress.exporters.predictor import Row, Text
    from compress.records.certificate import Tried
    from compress.records.latency import Setting

ROWS = 256
"""That ranges are taken from, spread evenly over the training split."""


@dataclass(frozen=True)
class RealRows:
    """Examples of a task, as `compress distill` names them; read when they are needed.

    data   source; text, label: its columns, where they are not found by themselves
    """

    data: str
    text: Sequence[str] | None = None
    label: str | None = None

    def calibration(self, bundle: Bundle) -> "Dataset":
        """Encoded examples of the training split. Raises BundleError for data of another task, DataError."""
        return _calibration(bundle, self.found(bundle))

    def texts(self, bundle: Bundle) -> "list[Text]":
        """Return all texts, or pairs, of every split."""
        found = self.found(bundle)
        columns = ("text", "text_pair") if bundle.task.pair else ("text",)
        splits = [split for split in (found.train, found.validation, found.test) if split is not None]
        rows = dict.fromkeys(row for split in splits for row in zip(*(split[name][:] for name in columns), strict=True))
        return [row if bundle.task.pair else row[0] for row in rows]

    def found(self, bundle: Bundle) -> "TaskData":
        """Its splits. Raises BundleError for data of another task, DataError."""
        from compress.exporters.bundle_data import data_of

        return data_of(bundle, self.data, text=self.text, label=self.label)


@dataclass(frozen=True)
class Judges:
    """The real rows of a race, as `tune` takes them: validation decides, test certifies where it has labels."""

    exam: "Exam | None" = None
    calibration: "Sequence[Row]" = ()
    proof: "Exam | None" = None
    split: str = "validation"
    data: str = ""

    @classmethod
    def of(cls, bundle: Bundle, found: "TaskData") -> "Judges":
        from compress.exporters.bundle_data import exam_of

        exam, rows = exam_of(bundle, found.validation), _calibration(bundle, found)
        if found.test is None:
            return cls(exam, rows, data=found.name)
        return cls(exam, rows, exam_of(bundle, found.test), "test", found.name)


@dataclass(frozen=True)
class Race:
    """Where and at what a bundle's files are raced; `max_drop`: of the score, that int8 may lose; `lan`, `timeout`,
    `python`: of the device, as in `open_device`."""

    device: str
    settings: "Sequence[Setting]"
    max_drop: float = 0.005
    lan: bool = False
    timeout: float = 60.0
    python: str = "python3"


@contextmanager
def tuned(
    source: Source, race: Race, rows: RealRows | None, *, in_place: bool, say: Callable[[str], None]
) -> Iterator[tuple[Shipped, "Sequence[Tried]"]]:
    """The bundle with the files that are fastest on the device, and all that were tried: see `compress.tuning.race`.

    `in_place`: it becomes the bundle's own; else it is gone afterwards. Raises ExportError for what is no bundle and
    cannot become one, DeviceError where the device fails.
    """
    from compress.benchmark.devices import open_device
    from compress.tuning.race import tune

    if isinstance(source, Encoder | Writer):
        raise ExportError(f"{source.name}: --tune races files of a model with a head for a task; this one has none")
    with (
        tempfile.TemporaryDirectory(prefix="compress-export.") as scratch,
        open_device(race.device, lan=race.lan, timeout=race.timeout, python=race.python, say=say) as device,
    ):
        bundle = source.bundle if isinstance(source, Shipped) else source.write(Path(scratch) / "bundle")
        judges = Judges() if rows is None else Judges.of(bundle, rows.found(bundle))
        found = tune(
            bundle,
            device=device,
            settings=race.settings,
            exam=judges.exam,
            calibration=judges.calibration,
            proof=judges.proof,
            split=judges.split,
            data=judges.data,
            max_drop=race.max_drop,
            out=None if in_place else Path(scratch) / "tuned" / bundle.path.name,
            say=say,
        )
        yield Shipped(source.name, found.bundle), found.tried


def _calibration(bundle: Bundle, found: "TaskData") -> "Dataset":
    from compress.exporters.bundle_data import exam_of

    return exam_of(bundle, found.train).spread(ROWS).rows


def table(tried: "Sequence[Tried]") -> "Table":
    """Every variant: its time at each setting, and what became of it."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    settings = list(dict.fromkeys(name for each in tried for name in each.p50_ms))
    shown.add_column("variant")
    for name in settings:
        shown.add_column(f"ms, {name}", justify="right")
    shown.add_column("")
    for each in tried:
        times = [f"{each.p50_ms[name]:.2f}" if name in each.p50_ms else "" for name in settings]
        became = "kept" if each.chosen else ("" if each.passed else "refused")
        shown.add_row(each.variant, *times, ": ".join(filter(None, (became, each.reason))))
    return shown
