"""A worker: joins the study of a search that runs elsewhere, and judges shapes beside it until it is over.

Start as many as there are machines, any time; what they need is in the study. One that is killed loses nothing: its
trial is run again, with the same parameters, by whoever is left.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import optuna

from compress.search.judge import Judge, Space
from compress.search.pulse import STEADY, Pulse
from compress.search.reach import Say
from compress.search.study import join_study
from compress.search.told import recorded
from compress.search.trials import run_trials


def work(
    storage: Path | str,
    study_name: str | None,
    make_judge: Callable[[Mapping[str, str]], tuple[Space, Judge]],
    *,
    seconds: float | None = None,
    say: Say = print,
    watch: Callable[[optuna.Study], None] | None = None,
    pulse: Pulse = STEADY,
) -> optuna.Study:
    """Judge shapes of that study (None: the only one there) until it has all it asks for, or `seconds` are over.

    make_judge   given the identity with which the study was begun: the space and the judge of it

    Raises what join_study and run_trials raise. The study as this worker left it.
    """
    study = join_study(storage, study_name, pulse=pulse, say=say)
    space, judge = make_judge(recorded(study)["of"])
    run_trials(study, space, judge, seconds=seconds, say=say, watch=watch, pulse=pulse)
    return study
