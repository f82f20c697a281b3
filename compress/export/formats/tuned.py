"""What an export does with real rows: calibrates on some, and races a bundle's files judged by others."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import ExportError
from compress.export.bundle import Bundle
from compress.export.source import Encoder, Shipped, Source, Writer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datasets import Dataset
    from rich.table import Table

    from compress.bench.protocol import Setting
    from compress.data.task import TaskData
    from compress.evidence import Tried
    from compress.exam import Exam
    from compress.export.predictor import Text

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
        return self._of(bundle, self._found(bundle).train).spread(ROWS).rows

    def judges(self, bundle: Bundle) -> "Mapping[str, object]":
        """What `tune` asks of real rows: validation decides, test certifies where it has labels."""
        found = self._found(bundle)
        exam, calibration = (self._of(bundle, split) for split in (found.validation, found.train))
        options = {"exam": exam, "calibration": calibration.spread(ROWS).rows, "data": found.name}
        return options if found.test is None else options | {"proof": self._of(bundle, found.test), "split": "test"}

    def texts(self, bundle: Bundle) -> "list[Text]":
        """All texts, or pairs, of validation and test."""
        found = self._found(bundle)
        columns = ("text", "text_pair") if bundle.task.pair else ("text",)
        splits = [split for split in (found.validation, found.test) if split is not None]
        rows = dict.fromkeys(row for split in splits for row in zip(*(split[name][:] for name in columns), strict=True))
        return [row if bundle.task.pair else row[0] for row in rows]

    def _of(self, bundle: Bundle, split: "Dataset") -> "Exam":
        from transformers import AutoTokenizer

        from compress.exam import Exam

        return Exam.of(bundle.task, split, AutoTokenizer.from_pretrained(bundle.path), bundle.manifest.max_length)

    def _found(self, bundle: Bundle) -> "TaskData":
        from compress.data import load_task
        from compress.quantize.pipeline import check

        task = bundle.task
        found = load_task(self.data, text=self.text, label=self.label, kind=task.kind, metric=task.metric)
        check(bundle, found, self.data)
        return found


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
    """The bundle with the files that are fastest on the device, and all that were tried: see `compress.export.tune`.

    `in_place`: it becomes the bundle's own; else it is gone afterwards. Raises ExportError for what is no bundle and
    cannot become one, DeviceError where the device fails.
    """
    from compress.bench.device import open_device
    from compress.export.tune import tune

    if isinstance(source, Encoder | Writer):
        raise ExportError(f"{source.name}: --tune races files of a model with a head for a task; this one has none")
    with (
        tempfile.TemporaryDirectory(prefix="compress-export.") as scratch,
        open_device(race.device, lan=race.lan, timeout=race.timeout, python=race.python, say=say) as device,
    ):
        bundle = source.bundle if isinstance(source, Shipped) else source.write(Path(scratch) / "bundle")
        options: Mapping[str, object] = {}
        if rows is not None:
            options = rows.judges(bundle)
        found = tune(
            bundle,
            device=device,
            settings=race.settings,
            max_drop=race.max_drop,
            out=None if in_place else Path(scratch) / "tuned" / bundle.path.name,
            say=say,
            **options,  # type: ignore[arg-type]
        )
        yield Shipped(source.name, found.bundle), found.tried


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
