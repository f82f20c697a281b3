"""What a study is of. Kept in the study, so that only the same search, by the same code, continues it or joins in."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import optuna

import compress
from compress.errors import SearchError, did_you_mean

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
