"""A study: begun, continued or joined, and run.

    study = open_study(folder / "journal.log", "sst2", {"teacher": ..., "data": ...}, objectives=("score", "latency"))
    run_trials(study, space, judge, trials=200)

A process is killed, a disk is full, a database restarts: the study is continued by the same two lines.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import optuna
from optuna.pruners import NopPruner
from optuna.storages import BaseStorage

from compress.address import redact
from compress.errors import SearchError
from compress.search.identity import OBJECTIVES, code_version, record, same, same_code
from compress.search.judge import Choice, Judge, Predicted, Space
from compress.search.pulse import STEADY, Pulse, me, sweep
from compress.search.reach import Say, StorageError, quiet, reaching
from compress.search.samplers import SAMPLERS, make_sampler
from compress.search.storage import close_storage, open_storage
from compress.search.told import front, front_table, points
from compress.search.trials import run_trials

__all__ = [
    "OBJECTIVES",
    "SAMPLERS",
    "Choice",
    "Judge",
    "Predicted",
    "Pulse",
    "Space",
    "StorageError",
    "close_study",
    "code_version",
    "front",
    "front_table",
    "join_study",
    "open_study",
    "points",
    "run_trials",
]


def open_study(
    storage: Path | str | BaseStorage,
    name: str,
    identity: Mapping[str, str],
    *,
    objectives: Sequence[str],
    limits: Mapping[str, float] | None = None,
    sampler: str = "tpe",
    seed: int | None = None,
    pulse: Pulse = STEADY,
    say: Say = print,
) -> optuna.Study:
    """Begin the study of that name, or continue it; trials whose worker is gone are queued again.

    identity     what the search is of, in words that workers can begin from too: teacher, data, space ...
    objectives   of `OBJECTIVES`, the score among them
    limits       of `OBJECTIVES` -> the most it may be; of the score: the least
    sampler      one of `SAMPLERS`; it and the seed may change when a study is continued

    Raises SearchError, the study untouched, if it is of something else, naming each difference, or was begun by another
    version of this code; StorageError if the storage cannot be reached.
    """
    wanted = record(identity, objectives, limits or {})
    make_sampler(sampler)
    with _opened(storage, pulse, say) as (opened, where), reaching(name):
        names = optuna.get_all_study_names(opened)
        if name not in names:
            _expect_room(storage, names, name)
            with quiet():
                directions = [OBJECTIVES[objective] for objective in objectives]
                study = optuna.create_study(
                    storage=opened, study_name=name, directions=directions, pruner=NopPruner(), load_if_exists=True
                )
                study.set_metric_names(list(objectives))
            study.set_user_attr("identity", wanted)
        study = _loaded(opened, name)
        if "identity" not in study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr("identity", wanted)  # killed between the two
        same(study, wanted, where)
        for key, value in {"sampler": sampler, "seed": seed}.items():
            if study.user_attrs.get(key, "none") != value:
                study.set_user_attr(key, value)
        study.sampler = make_sampler(sampler, seed, [len(study.get_trials(deepcopy=False))])
        sweep(study, pulse, say)
        return study


def join_study(
    storage: Path | str | BaseStorage, name: str | None = None, *, pulse: Pulse = STEADY, say: Say = print
) -> optuna.Study:
    """A study that another process began; the only one in the storage if no name is given.

    Its draws differ from those of every other worker. Raises SearchError if there is none, or which is not said, or it
    was begun by another version of this code; StorageError if the storage cannot be reached.
    """
    with _opened(storage, pulse, say) as (opened, where), reaching(name or where):
        names = optuna.get_all_study_names(opened)
        if not names:
            raise SearchError(f"{where}: holds no study yet; begin it first, then start workers")
        if name is None and len(names) > 1:
            raise SearchError(f"{where}: holds {len(names)} studies; name one of {', '.join(sorted(names))}")
        if name is not None and name not in names:
            raise SearchError(f"{where}: holds no study {name!r}, but {', '.join(sorted(names))}")
        study = _loaded(opened, name or names[0])
        same_code(study, where)
        stream = [len(study.get_trials(deepcopy=False)), crc32(repr(me()).encode())]
        study.sampler = make_sampler(study.user_attrs.get("sampler", "tpe"), study.user_attrs.get("seed"), stream)
        return study


def close_study(study: optuna.Study) -> None:
    """Give back its connections to a database or proxy; the study is not used after that."""
    close_storage(study._storage)


@contextmanager
def _opened(storage: Path | str | BaseStorage, pulse: Pulse, say: Say) -> Iterator[tuple[BaseStorage, str]]:
    """The storage and its name in messages; what was opened here is closed again if it is not used."""
    if isinstance(storage, BaseStorage):
        yield storage, type(storage).__name__
        return
    opened = open_storage(storage, pulse, say)
    try:
        yield opened, redact(storage)
    except BaseException:
        close_storage(opened)
        raise


def _loaded(storage: BaseStorage, name: str) -> optuna.Study:
    with quiet():
        # The sampler is set once the study is known to be the right one.
        return optuna.load_study(study_name=name, storage=storage, sampler=make_sampler("random"), pruner=NopPruner())


def _expect_room(storage: Path | str | BaseStorage, names: Sequence[str], name: str) -> None:
    """A journal is one study's; a database may hold many."""
    if names and not isinstance(storage, BaseStorage) and "://" not in str(storage):
        raise SearchError(
            f"{storage}: holds study {', '.join(sorted(names))}, not {name!r}; choose another folder or name"
        )
