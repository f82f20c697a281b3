"""What a search is asked for: teacher, data, space, budgets and where they are measured; kept as search.yaml.

This module does not import torch.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import optuna
import yaml
from pydantic import Field, ValidationError, field_validator

import compress
from compress import io
from compress.config import user_code
from compress.config.loader import parsed
from compress.config.recipe import Frozen
from compress.data.task import Kind
from compress.errors import SearchError, did_you_mean
from compress.nas import space_file
from compress.nas.budget import Budget
from compress.nas.space_file import Space
from compress.records.latency import Setting

if TYPE_CHECKING:
    from compress.exporters.artifact import Precision

OBJECTIVES: Mapping[str, Literal["maximize", "minimize"]] = {
    "score": "maximize",
    "latency": "minimize",
    "parameters": "minimize",
    "flops_per_token": "minimize",
    "file_mb": "minimize",
}
"""What a study can be over, and what may be limited: the score from below, the others from above."""


@cache
def code_version() -> str:
    """The version of this package and a digest of its Python files: workers of a study must have the same."""
    folder = Path(compress.__file__).parent
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda each: each.relative_to(folder).as_posix()):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{compress.__version__}+{total.hexdigest()[:12]}"


def record(identity: Mapping[str, str], objectives: Sequence[str], limits: Mapping[str, float]) -> dict[str, Any]:
    """What is kept in the study. Raises SearchError for objectives or limits that are none of `OBJECTIVES`."""
    if not objectives or len(set(objectives)) < len(objectives):
        raise SearchError(f"objectives {list(objectives)}: expected one or more, each once, of {', '.join(OBJECTIVES)}")
    for name in [*objectives, *limits]:
        if name not in OBJECTIVES:
            raise SearchError(f"no objective {name!r}.{did_you_mean(name, OBJECTIVES)}")
    if "score" not in objectives:
        raise SearchError(f"objectives {', '.join(objectives)}: the score must be one, or the smallest shape is best")
    return {
        "of": dict(identity),
        "objectives": list(objectives),
        "limits": {name: float(limit) for name, limit in limits.items()},
        "code": code_version(),
    }


def same(study: optuna.Study, wanted: Mapping[str, Any], where: str) -> None:
    """Raise SearchError, naming every difference, unless the study is of what is `wanted`."""
    kept = kept_by(study, where)
    before, now = _flat(kept), _flat(wanted)
    differences = [
        f"{name}: was {before.get(name, 'not there')!s}, now {now.get(name, 'not there')!s}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if differences:
        raise SearchError(
            f"{where}: study {study.study_name!r} is another search. {'; '.join(differences)}. Repeat what it was "
            f"started with, or give the new search a name or a storage of its own"
        )
    same_code(study, where)


def same_code(study: optuna.Study, where: str) -> None:
    """Raise SearchError unless the study was begun by the code that runs here."""
    begun = kept_by(study, where)["code"]
    if begun != code_version():
        raise SearchError(
            f"{where}: study {study.study_name!r} was begun by compress {begun}, this is {code_version()}: the same "
            f"shape could score differently. Install here what the study was begun with, or begin a new study"
        )


def kept_by(study: optuna.Study, where: str) -> dict[str, Any]:
    """What `record` wrote into the study. Raises SearchError where there is no such record."""
    kept = study.user_attrs.get("identity")
    if not isinstance(kept, dict) or not {"of", "objectives", "limits", "code"} <= kept.keys():
        raise SearchError(f"{where}: study {study.study_name!r} was not begun by `compress search`; give another")
    return kept


def _flat(kept: Mapping[str, Any]) -> dict[str, str]:
    limits = {f"limit of {name}": f"{limit:g}" for name, limit in kept["limits"].items()}
    return {**kept["of"], "objectives": ", ".join(kept["objectives"]), **limits}


NAME = "search.yaml"
FEWEST = 5
"""Shapes that a prediction needs at least (`latency.FEWEST`)."""


class Columns(Frozen):
    """What of the data is not detected: see `compress.distill`."""

    text: Sequence[str] | None = None
    label: str | None = None
    kind: Kind | None = None
    metric: str | None = None


class Search(Frozen):
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
    columns: Columns = Field(default_factory=Columns)
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
    shapes: int = Field(16, ge=FEWEST, le=64)
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
        """Those in which shapes are measured."""
        chosen: Any = self.space.axes.get("precision", (self.precision,))
        return tuple(chosen)

    @property
    def max_length(self) -> int:
        """Of the texts that what ships reads."""
        return self.space.final[-1].max_length

    def identity(self) -> dict[str, str]:
        """In short, for a study to be known by."""
        tree = self.plain()
        words = {name: str(tree[name]) for name in ("teacher", "data", "device", "precision", "training", "seed")}
        allowed = {name: f"{value:g}" for name, value in tree["budget"].items() if value is not None}
        return {
            **words, **allowed, "space": self.space.name, "setting": str(self.setting),
            "search": io.of_value(tree)[:16],
        }  # fmt: skip

    def with_code(self, allow_code: str | Path | None) -> "Search":
        """Return the search with the user's own functions that its space names. Raises RecipeError."""
        return self.model_copy(update={"space": user_code.load(self.space, allow_code)})

    def plain(self) -> dict[str, Any]:
        """Plain data with every number."""
        return self.model_dump(mode="json", exclude={"space"}) | {"space": self.space.plain()}

    def to_yaml(self) -> str:
        """search.yaml. Reading it again gives an equal search."""
        return yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True, width=120)

    @staticmethod
    def of(**given: Any) -> "Search":
        """Raises SearchError with every problem, in the words of the command line."""
        try:
            return Search.model_validate(given)
        except ValidationError as error:
            raise SearchError("\n".join(map(_said, error.errors()))) from error

    @staticmethod
    def from_yaml(text: str, source: str) -> "Search":
        """What `to_yaml` wrote. Raises SearchError."""
        tree = parsed(text, source)
        if not isinstance(tree, dict) or not isinstance(tree.get("space"), dict):
            raise SearchError(f"{source}: is not a search of this tool")
        return Search.of(**tree | {"space": space_file.of_tree(tree["space"], source)})

    @staticmethod
    def read(study: Path) -> "Search":
        """Of the study in this folder. Raises SearchError where there is none."""
        file = study / NAME
        if not file.is_file():
            raise SearchError(f"{study}: holds no search; expected the folder that `compress search --out` made")
        return Search.from_yaml(file.read_text(encoding="utf-8"), str(file))


def _said(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    option = {"objectives": "objective", "anchors": "anchor"}.get(str(error["loc"][0]), str(error["loc"][0]))
    shown = f", found {error['input']!r}" if isinstance(error["input"], str | int | float) else ""
    return f"--{option.replace('_', '-')}: {message}{shown}"
