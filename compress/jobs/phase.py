"""A phase of a command: it does one thing to a job, and estimates what that takes."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from compress.records.forecast import PhaseEstimate

JobT = TypeVar("JobT")
Estimated = tuple[JobT, list[PhaseEstimate]]
"""The job after the trial of a phase, and what the whole phase takes."""


class Phase(Generic[JobT]):
    """Does one thing to the job of a command."""

    def pending(self, job: JobT) -> dict[str, str]:
        """Return what it would do, as a verb with its object, by the name of the stage
        whose result shows that it is done ('' if there is none)."""
        return {}

    def run(self, job: JobT) -> JobT:
        """Return the job with what this phase has made."""
        return job

    def estimate(self, job: JobT) -> Estimated[JobT]:
        """Try the phase for a few steps or rows. Return the job with what that has
        made, for the phases after it, and what the whole phase takes."""
        return job, []


def run_phases(phases: Sequence[Phase[JobT]], job: JobT) -> JobT:
    """Run phases one after another; return the job of the last."""
    for phase in phases:
        job = phase.run(job)
    return job


def estimate_phases(phases: Sequence[Phase[JobT]], job: JobT) -> Estimated[JobT]:
    """Try phases one after another; return the job of the last, and the estimates of
    all."""
    estimates = list[PhaseEstimate]()
    for phase in phases:
        job, found = phase.estimate(job)
        estimates += found
    return job, estimates
