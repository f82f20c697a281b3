"""The settings of a search: teacher, data, space, budget and where it is measured; kept as search.yaml.

This module does not import torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from compress import io
from compress.config import user_code
from compress.config.loader import parse_yaml
from compress.config.options import BudgetOptions, DataOptions
from compress.config.recipe import Frozen
from compress.errors import SearchError, did_you_mean
from compress.nas import space_file
from compress.nas.space_file import Space
from compress.records.latency import FEWEST_SHAPES, Setting
from compress.records.search_report import ObjectiveName

if TYPE_CHECKING:
    from compress.exporters.artifact import Precision

OBJECTIVES: Mapping[str, Literal["maximize", "minimize"]] = {
    "score": "maximize",
    "latency": "minimize",
    "parameters": "minimize",
    "flops_per_token": "minimize",
    "file_mb": "minimize",
}
"""The objectives of a study, which may also be limited: the score from below, the others from above."""
NAME = "search.yaml"
SURE = 2.0
"""Standard deviations of its prediction by which a shape must be within the latency asked for."""


def describe_choice(choice: Mapping[str, Any]) -> str:
    """Write a choice as `layers 4, hidden 256, heads 8, ffn 768`."""
    return ", ".join(f"{name.removeprefix('config.')} {value}" for name, value in choice.items())


@dataclass(frozen=True, kw_only=True)
class Budget(BudgetOptions):
    """The limits of one student, checked: see `BudgetOptions`."""

    def __post_init__(self) -> None:
        """Raise SearchError for limits that nothing can keep."""
        for each in fields(self):
            value, option = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            if value is not None and not value > 0 and each.name != "min_score":
                raise SearchError(f"{option} {value:g}: expected a number above 0")
        if self.speedup is not None and self.speedup <= 1:
            raise SearchError(
                f"--speedup {self.speedup:g}: the teacher itself has 1; expected more, as in 2 for half of its latency"
            )
        if self.min_score is not None and self.min_score > 1:
            raise SearchError(f"--min-score {self.min_score:g}: no metric is above 1; expected a share, as in 0.9")

    def limits(self, teacher_ms: float | None) -> dict[ObjectiveName, float]:
        """Return the most that each objective may be, of the score the least; a speed-up limits the latency.

        Raises SearchError for a speed-up where the teacher was not measured.
        """
        most = self.max_latency_ms
        if self.speedup is not None:
            if teacher_ms is None:
                raise SearchError(
                    f"--speedup {self.speedup:g}: the teacher has no latency to compare with, as it cannot be "
                    "exported; give --max-latency-ms"
                )
            most = min(teacher_ms / self.speedup, most or math.inf)
        named: dict[ObjectiveName, float | None] = {
            "latency": most, "parameters": self.max_params, "file_mb": self.max_file_mb, "score": self.min_score,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value is not None}


class SearchConfig(Frozen):
    """A search: the same one is resumed, joined by workers, and shown.

    budget      what a student may cost; a latency is of the file of `precision` on `device`, in one forward of `batch`
                texts of `seq` tokens, a speed-up over the teacher's own file of that precision there
    objectives  what the front is over; the score is one
    precision   of the file, where the space does not choose it
    training    what training computes in
    max_drop    of the score, that the int8 file of a student that ships may lose
    shapes      how many are measured to predict the others
    rounds, runs  of each measurement, as of `compress bench`
    anchors     bundles of the same task that are scored and measured beside the shapes, to compare with
    """

    teacher: str
    data: str
    columns: DataOptions = DataOptions()
    space: Space
    budget: Budget = Budget()
    objectives: tuple[str, ...] = ("score", "latency")
    device: str = "local"
    threads: int = Field(1, gt=0, le=1024)
    batch: int = Field(1, gt=0, le=100_000)
    seq: int = Field(128, gt=0, le=1_000_000)
    precision: Literal["int8", "fp32"] = "int8"
    training: Literal["bf16", "fp32"] = "fp32"
    max_drop: float = Field(0.005, ge=0, le=1)
    shapes: int = Field(16, ge=FEWEST_SHAPES, le=64)
    rounds: int = Field(4, ge=2)
    runs: int = Field(10, ge=1)
    anchors: tuple[str, ...] = ()
    seed: int = 0

    @field_validator("objectives")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in OBJECTIVES:
                raise ValueError(f"no objective {name!r}.{did_you_mean(name, OBJECTIVES)}")
        if "score" not in names or len(set(names)) < len(names):
            raise ValueError(f"{', '.join(names) or 'nothing'}; expected score and others, each once")
        return names

    @property
    def setting(self) -> Setting:
        return Setting(threads=self.threads, batch=self.batch, seq=self.seq)

    @property
    def precisions(self) -> "tuple[Precision, ...]":
        """Return the precisions in which shapes are measured."""
        chosen: Any = self.space.axes.get("precision", (self.precision,))
        return tuple(chosen)

    @property
    def max_length(self) -> int:
        """Return the tokens of the longest text that the shipped student reads."""
        return self.space.final[-1].max_length

    def identity(self) -> dict[str, str]:
        """Describe the search in short, for a study to be known by."""
        tree = self.plain()
        words = {name: str(tree[name]) for name in ("teacher", "data", "device", "precision", "training", "seed")}
        allowed = {name: f"{value:g}" for name, value in tree["budget"].items() if value is not None}
        return {
            **words, **allowed, "space": self.space.name, "setting": str(self.setting),
            "search": io.of_value(tree)[:16],
        }  # fmt: skip

    def with_code(self, allow_code: str | Path | None) -> "SearchConfig":
        """Return the search with the user's own functions that its space names. Raises RecipeError."""
        return self.model_copy(update={"space": user_code.load(self.space, allow_code)})

    def plain(self) -> dict[str, Any]:
        """Plain data with every number."""
        return self.model_dump(mode="json", exclude={"space"}) | {"space": self.space.plain()}

    def to_yaml(self) -> str:
        """search.yaml. Reading it again gives an equal search."""
        return yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True, width=120)

    @staticmethod
    def of(**given: Any) -> "SearchConfig":
        """Check the settings. Raises SearchError with every problem, in the words of the command line."""
        try:
            return SearchConfig.model_validate(given)
        except ValidationError as error:
            raise SearchError("\n".join(map(_said, error.errors()))) from error

    @staticmethod
    def from_yaml(text: str, source: str) -> "SearchConfig":
        """Load what `to_yaml` wrote. Raises SearchError."""
        tree = parse_yaml(text, source)
        if not isinstance(tree, dict) or not isinstance(tree.get("space"), dict):
            raise SearchError(f"{source}: is not a search of this tool")
        return SearchConfig.of(**tree | {"space": space_file.of_tree(tree["space"], source)})

    @staticmethod
    def read(study: Path) -> "SearchConfig":
        """Load search.yaml from the study folder. Raises SearchError where there is none."""
        file = study / NAME
        if not file.is_file():
            raise SearchError(f"{study}: holds no search; expected the folder that `compress search --out` made")
        return SearchConfig.from_yaml(file.read_text(encoding="utf-8"), str(file))


def _said(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    option = {"objectives": "objective", "anchors": "anchor"}.get(str(error["loc"][0]), str(error["loc"][0]))
    shown = f", found {error['input']!r}" if isinstance(error["input"], str | int | float) else ""
    return f"--{option.replace('_', '-')}: {message}{shown}"
