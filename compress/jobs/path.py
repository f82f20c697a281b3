"""The phase that finds the smallest student that keeps a share of its teacher's score.

The model is cut a little and recovers briefly from the teacher's cached answers, again
and again, until it keeps too little: "prune, distil, and prune again" (Muralidharan et
al. 2024, arXiv:2407.14679, Sec. 4). The smallest students that may still keep the share
recover for longer; the smallest that is likely to keep it trains in full, or a larger
one if it misses. Each continues from its own weights.

path.json in the run holds the cuts that were decided, and what each student keeps, so
that a resumed run continues like an uninterrupted one.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter
from transformers import PreTrainedModel

from compress.config.recipe import Recipe, Target
from compress.config.stages import AnyStage, Prune, SizeRequest, Stage
from compress.console import print_note, warn
from compress.errors import PruneError
from compress.evaluation import metrics
from compress.evaluation.evaluator import Evaluator
from compress.evaluation.kept import foresee, judge_kept
from compress.io import write_json
from compress.jobs.far_end import describe_far_end, far_recipe
from compress.jobs.job import Job
from compress.jobs.phase import Estimated, Phase, estimate_phases, run_phases
from compress.pruning.path import (
    CUT,
    CUT_ROWS,
    FIRST_CUT,
    Cutter,
    ShapeCosts,
    compute_costs,
)
from compress.records.forecast import PhaseEstimate
from compress.records.path import KeptScore, PathStudent, Training, WalkedPath
from compress.reporting.terminal import print_table
from compress.reporting.walk import (
    describe_kept,
    describe_sizes,
    explain_unresolved,
    path_table,
)
from compress.training.processes import from_first
from compress.training.schedule import EFFORTS

PATH_FILE = "path.json"
COSTS_FILE = "path-costs.json"
MOST_RUNGS = 14
"""Maximum number of students on the path."""
STEPS: Mapping[Training, int] = {"brief": 200, "long": 600}
"""Optimiser steps of the short recoveries."""
READ_AGAIN = 0.9
"""Rows that short recoveries read, as a share of those that a brief one goes through:
below 1, rows repeat, so that caching the teacher's answers pays (`cache_teacher:
auto`)."""
REACH = 3.0
LEAST_REACH = 0.03
"""The path ends at a student that falls below the share to keep by REACH times the
allowed loss, and by at least LEAST_REACH of the score: more training does not bring
that back."""
RECOVERED_LONGER = 3
"""Number of students that recover for longer."""
TRAINED_IN_FULL = 3
"""Maximum number of students that are trained in full."""
WALK_SHARE = 0.35
"""The share of `--minutes` in which the path may begin another cut."""
FULL_GAIN = 0.5
"""What training in full adds, as a share of what the longer recovery has added, until a
student has shown it."""
WORTH_TRAINING = 0.5
"""The minimum chance at which a student is trained in full: a miss costs minutes, and
shows what training in full adds; one that is not tried may be half as fast again."""


def read_path(file: Path) -> WalkedPath:
    """Read what a walk has written."""
    return TypeAdapter(WalkedPath).validate_json(file.read_bytes())


@dataclass(frozen=True)
class KeepScore(Phase[Job]):
    """Run phases for the smallest student that keeps the share of the score that the
    recipe asks for. The first of them trains it."""

    phases: tuple[Phase[Job], ...]

    def pending(self, job: Job) -> dict[str, str]:
        share = job.models.recipe.target.keep
        found = {"": f"look for the smallest student that keeps {share:.1%}"}
        for phase in self.phases[1:]:
            found |= phase.pending(job)
        return found

    def run(self, job: Job) -> Job:
        walk = Walk.open(job)
        if (found := walk.try_far_end(self.phases[0])) is not None:
            return run_phases(self.phases[1:], found)
        walk.descend()
        if not walk.path.rungs:
            raise PruneError(
                f"--keep: {job.teacher.name} has no shape that is {FIRST_CUT:g} times "
                "cheaper: there is nothing to prune"
            )
        walk.train_finalists()
        walked = walk.train_in_full(self.phases[0])
        return run_phases(self.phases[1:], walked)

    def estimate(self, job: Job) -> Estimated[Job]:
        layers = job.models.base_teacher.model.config.num_hidden_layers
        recipe = job.models.recipe
        whole = Target.model_validate({"layers": layers})
        recipe = recipe.model_copy(update={"target": whole})
        brief = make_recovery(recipe, "brief", "path")
        cut = recipe.model_copy(update={"stages": (*recipe.pruning, brief)})
        _, tried = self.phases[0].estimate(job.with_recipe(cut))
        job, trained = self.phases[0].estimate(job.with_recipe(recipe))
        job, shipped = estimate_phases(self.phases[1:], job)
        again = [_estimate_repeated(each) for each in trained]
        return job, [_estimate_path(tried[-1], brief), *again, *shipped]


def _estimate_repeated(whole: PhaseEstimate) -> PhaseEstimate:
    """Estimate the phase of students from one of the whole model, for as many as may be
    trained in full."""
    least, most = whole.seconds
    seconds = (least / FIRST_CUT, most * TRAINED_IN_FULL / FIRST_CUT)
    least_steps, most_steps = whole.steps
    steps = (least_steps, most_steps * TRAINED_IN_FULL)
    return replace(whole, steps=steps, seconds=seconds)


def _estimate_path(brief: PhaseEstimate, stage: Stage) -> PhaseEstimate:
    """Estimate a path from a brief recovery of the whole model: every student takes
    less time than the one before, by the factor of the cut."""
    shares = [1 / (FIRST_CUT * CUT**rung) for rung in range(MOST_RUNGS)]
    longer = STEPS["long"] / STEPS["brief"]
    least_share = sum(shares[:2]) + longer * shares[1]
    most_share = sum(shares) + longer * sum(shares[:RECOVERED_LONGER])
    steps = stage.steps or 0
    long_steps = round(longer * steps)
    least = 2 * steps + long_steps
    most = MOST_RUNGS * steps + RECOVERED_LONGER * long_steps
    least_seconds, most_seconds = brief.seconds
    return replace(
        brief,
        name="path",
        steps=(least, most),
        seconds=(least_share * least_seconds, most_share * most_seconds),
        note="without timing files, scoring students, and a static one that may be "
        "tried first",
    )


def make_recovery(recipe: Recipe, training: Training, name: str) -> Stage:
    """Return a short stage for a student, with the first objective that the recipe has
    after its cuts."""
    stage = recovering_stages(recipe)[0]
    effort = EFFORTS[stage.effort]
    update = {
        "name": f"{training}-{name}",
        "table": "full",
        "steps": round(STEPS[training] * effort),
        "max_epochs": None,
        "augment": None,
        "corpus": False,
        "improve": False,
        "limit_rows": round(READ_AGAIN * STEPS["brief"] * effort * stage.batch),
        "cache_teacher": "auto",
        "evaluate": 0,
    }
    return stage.model_copy(update=update)


def recovering_stages(recipe: Recipe) -> list[Stage]:
    """Return the stages that train after the last cut of the recipe."""
    last = recipe.stages.index(recipe.pruning[-1])
    return [stage for stage in recipe.stages[last:] if isinstance(stage, Stage)]


@dataclass(frozen=True)
class Walk:
    """A path on the way from the teacher of a job to its student.

    cutter     chooses its cuts; evaluator: of the validation split
    """

    job: Job
    cutter: Cutter
    evaluator: Evaluator

    @staticmethod
    def open(job: Job) -> "Walk":
        """Begin the path of a run, or continue it. Raises PruneError for a share that
        guessing keeps."""
        models = job.models
        context = models.context
        run = models.run
        evaluator = Evaluator.from_split(
            context.data.task,
            context.data.validation,
            job.teacher.tokenizer,
            models.recipe.stages[-1].length,
        )
        _check_share(job, evaluator)
        model = job.teacher.model
        file = run.path / COSTS_FILE
        if run.main and not file.is_file():
            write_json(file, asdict(compute_costs(model, models.recipe, context)))
        costs = from_first(
            lambda: TypeAdapter(ShapeCosts).validate_json(file.read_bytes())
        )
        cutter = Cutter(models.recipe, job.teacher, context, costs, run.seed)
        walk = Walk(job, cutter, evaluator)
        if run.main and not walk.file.is_file():
            target = models.recipe.target
            assert target.keep is not None, "the phase is for this target"
            walk.save(WalkedPath(target.keep, target.least, costs.where, costs.whole))
        return walk

    @property
    def file(self) -> Path:
        return self.job.models.run.path / PATH_FILE

    @property
    def path(self) -> WalkedPath:
        """The path as it is now, the same in every process."""
        return from_first(partial(read_path, self.file))

    @property
    def recipe(self) -> Recipe:
        return self.job.models.recipe

    def save(self, path: WalkedPath) -> None:
        """Write the path, in the first process."""
        if self.job.models.run.main:
            write_json(self.file, asdict(path))

    def try_far_end(self, training: Phase[Job]) -> Job | None:
        """Train the static student, if words alone come near; return the job with it if
        it keeps the share."""
        path = self.path
        if path.rungs:
            return None
        recipe = from_first(partial(far_recipe, self.job))
        if recipe is None:
            return None
        if path.far is None:
            far = from_first(partial(describe_far_end, self.job, recipe))
            path = replace(path, far=far)
            self.save(path)
        assert path.far is not None, "it was described"
        later = recovering_stages(self.recipe)
        # the path needs the weights that training casts
        teacher = self.job.teacher
        teacher = replace(teacher, model=copy.deepcopy(teacher.model))
        models = replace(self.job.models, recipe=recipe, task_teacher=teacher)
        job = replace(self.job, models=models)
        done = training.run(self._limit(job, [*recipe.training, *later]))
        assert done.student is not None, "the phase has trained it"
        look = self._judge(done.student)
        far = replace(path.far, looks={"finished": look})
        path = replace(path, far=far)
        self._say(f"{far.name}: keeps {describe_kept(look)} when finished")
        if not look.keeps:
            self.save(path)
            return None
        self.save(replace(path, stopped="words alone keep the share"))
        return self._finish(done, far)

    def descend(self) -> None:
        """Cut and recover until the path ends."""
        while not self.path.stopped:
            if len(self.path.looked_at("brief")) == len(self.path.rungs):
                self._cut()
            else:
                self._recover_briefly(self.path.rungs[-1])

    def _cut(self) -> None:
        """Decide the next cut, or that there is none."""
        path = self.path
        model = self.job.teacher.model
        limit = path.whole / FIRST_CUT
        if path.rungs:
            model = self._train(self._chain(path.rungs[-1]))
            limit = path.rungs[-1].cost / CUT
        stage = self._cut_stage(f"cut-{len(path.rungs) + 1}")
        stopped = from_first(partial(self._why_stopped, path))
        student = None if stopped else self.cutter.next(model, limit, stage)
        if student is None:
            self.save(replace(path, stopped=stopped or "no shape is smaller"))
        else:
            self.save(path.with_student(student))

    def _recover_briefly(self, rung: PathStudent) -> None:
        look = self._look(rung, "brief", self._train(self._chain(rung)))
        self._say(f"{rung.name}: {describe_sizes(rung)}: keeps {describe_kept(look)}")

    def _say(self, line: str) -> None:
        console = self.job.models.context.console
        console.print(line, highlight=False)

    def _why_stopped(self, path: WalkedPath) -> str:
        """Say why the path goes no further; '' if it does."""
        if not path.rungs:
            return ""
        last = path.rungs[-1]
        share = last.looks["brief"].share
        limit = self.job.models.context.time_limit
        if share < _floor(path):
            return f"{last.name} keeps only {share:.1%}"
        if len(path.rungs) == MOST_RUNGS:
            return f"{MOST_RUNGS} shapes were tried"
        if limit is not None and limit.spent > WALK_SHARE:
            return f"--minutes {limit.minutes:g} leave no time for another cut"
        return ""

    def train_finalists(self) -> None:
        """Let the smallest students that may keep the share recover for longer."""
        floor = _floor(self.path)
        rungs = self.path.rungs
        within = [rung for rung in rungs if rung.looks["brief"].share >= floor]
        for rung in within[-RECOVERED_LONGER:]:
            if "long" not in rung.looks:
                stages = [*self._chain(rung), self._recovery("long", rung)]
                self._look(rung, "long", self._train(stages))

    def train_in_full(self, training: Phase[Job]) -> Job:
        """Train the smallest student that may well keep the share in full, a larger one
        if it misses, and a smaller one if it has gained more than was expected; return
        the job with the smallest that keeps it, or else with the nearest."""
        while (rung := self._choose(self.path)) is not None:
            self._say(f"training {rung.name} in full: {describe_sizes(rung)}")
            done = training.run(self._full_job(rung))
            assert done.student is not None, "the phase has trained it"
            look = self._look(rung, "finished", done.student)
            self._say(f"{rung.name}: keeps {describe_kept(look)} when finished")
        best = _best(self.path)
        return self._finish(training.run(self._full_job(best)), best)

    def _choose(self, path: WalkedPath) -> PathStudent | None:
        """Choose the student to train in full: the smallest that may well keep the
        share, between one that has kept it and one that has missed it. None: no more
        are tried."""
        kept, missed = _tried(path)
        between = path.rungs[max(kept, default=-1) + 1 : min(missed, default=None)]
        if not between or len(kept) + len(missed) == TRAINED_IN_FULL:
            return None
        # it was trained for all the time that there was
        if kept and self.job.models.context.time_limit is not None:
            return None
        gains = self._gains(path)
        likely = [rung for rung in between if _is_worth_it(rung, path.keep, gains)]
        if likely:
            return likely[-1]
        if kept:
            return None
        return between[-1] if missed else between[0]

    def _gains(self, path: WalkedPath) -> dict[Training, float]:
        """Return what training in full adds to the share that a student keeps after
        each shorter recovery, learnt from the students that had more."""
        looks = [rung.looks for rung in path.rungs]
        longer = [
            each["long"].share - each["brief"].share for each in looks if "long" in each
        ]
        by_long = max(0.0, fmean(longer)) if longer else 0.0
        in_full = [
            each["finished"].share - _share_after_long(each, by_long)
            for each in looks
            if "finished" in each
        ]
        after_long = fmean(in_full) if in_full else FULL_GAIN * by_long
        return {"brief": by_long + after_long, "long": after_long}

    def _finish(self, done: Job, rung: PathStudent) -> Job:
        """Record the student that ships; return the job with the path."""
        path = replace(self.path, chosen=rung.name)
        self.save(path)
        console = self.job.models.context.console
        print_table(console, path_table(path), more="on the page")
        look = rung.looks["finished"]
        if not look.keeps:
            warn(
                console,
                f"--keep {path.keep:.1%}: no student on the path is likely to keep it; "
                f"the nearest, {rung.name}, keeps {describe_kept(look)}",
            )
        if not look.resolved:
            print_note(console, explain_unresolved(look, path.keep))
        return replace(done, path=self.path, asked=self.recipe)

    def _chain(self, rung: PathStudent) -> list[AnyStage]:
        """Return the cuts and brief recoveries from the teacher to a rung."""
        stages = list[AnyStage]()
        names = [each.name for each in self.path.rungs]
        until = names.index(rung.name) + 1
        for each in self.path.rungs[:until]:
            stages += [self._cut_to(each), self._recovery("brief", each)]
        return stages

    def _cut_stage(self, name: str) -> Prune:
        """Return a stage that cuts, to sizes that are not chosen yet."""
        update = {"name": name, "rows": CUT_ROWS}
        return self.recipe.pruning[-1].model_copy(update=update)

    def _cut_to(self, rung: PathStudent) -> Prune:
        """Return the stage that cuts to the sizes of a student."""
        sizes = dict(rung.sizes)
        del sizes["head_size"]
        update = {"to": SizeRequest.model_validate(sizes)}
        return self._cut_stage(rung.name).model_copy(update=update)

    def _recovery(self, training: Training, rung: PathStudent) -> Stage:
        return make_recovery(self.recipe, training, rung.name)

    def _full_job(self, rung: PathStudent) -> Job:
        """Return the job of a student: the path to it, and the recipe's own stages from
        there."""
        stages = self._chain(rung)
        if "long" in rung.looks:
            stages.append(self._recovery("long", rung))
        own = [
            stage.model_copy(update={"name": f"{stage.name}-{rung.name}"})
            for stage in recovering_stages(self.recipe)
        ]
        update = {"target": Target.model_validate({}), "stages": (*stages, *own)}
        job = self.job.with_recipe(self.recipe.model_copy(update=update))
        return self._limit(job, own)

    def _limit(self, job: Job, stages: Sequence[Stage]) -> Job:
        """Return the job with the time that is left, if it is limited, split over these
        stages."""
        context = job.models.context
        if context.time_limit is None:
            return job
        names = tuple(stage.name for stage in stages)
        limit = replace(context.time_limit, stages=names)
        return job.with_context(replace(context, time_limit=limit))

    def _train(self, stages: Sequence[AnyStage]) -> PreTrainedModel:
        """Run the stages that are not done, and return the model of the last."""
        recipe = self.recipe.model_copy(update={"stages": tuple(stages)})
        models = replace(self.job.models, recipe=recipe)
        return models.run_stages(stages)

    def _look(
        self,
        rung: PathStudent,
        training: Training,
        student: PreTrainedModel,
    ) -> KeptScore:
        """Judge a student on the validation split, and record it."""
        if training in rung.looks:
            return rung.looks[training]
        kept = self._judge(student)
        self.save(self.path.with_look(rung.name, training, kept))
        return self.path.rung(rung.name).looks[training]

    def _judge(self, student: PreTrainedModel) -> KeptScore:
        """Judge a student against the teacher on the validation split."""
        check = self.job.check
        assert check is not None, "the teacher was checked first"
        context = self.job.models.context
        rows = self.evaluator.rows
        logits = metrics.logits(student, rows, context.collate, bf16=context.bf16)
        target = self.recipe.target
        assert target.keep is not None, "the phase is for this target"
        return judge_kept(
            self.evaluator, logits, check.logits, target.keep, target.confidence
        )


def _tried(path: WalkedPath) -> tuple[list[int], list[int]]:
    """Return the places on the path of students that keep the share once they are
    finished, and of students that do not."""
    kept = list[int]()
    missed = list[int]()
    for place, rung in enumerate(path.rungs):
        if "finished" in rung.looks:
            (kept if rung.looks["finished"].keeps else missed).append(place)
    return kept, missed


def _best(path: WalkedPath) -> PathStudent:
    """Return the smallest student that keeps the share, or else the likeliest to."""
    kept, _ = _tried(path)
    if kept:
        return path.rungs[kept[-1]]
    finished = path.looked_at("finished")
    return max(finished, key=lambda rung: rung.looks["finished"].chance)


def _floor(path: WalkedPath) -> float:
    """Return the share of the score below which a brief recovery shows that a student
    is too small."""
    return path.keep - max(LEAST_REACH, REACH * (1 - path.keep))


def _share_after_long(looks: Mapping[Training, KeptScore], gain: float) -> float:
    """Return the share after the longer recovery; without one, what it would be with
    its usual gain."""
    if "long" in looks:
        return looks["long"].share
    return looks["brief"].share + gain


def _is_worth_it(
    rung: PathStudent,
    keep: float,
    gains: Mapping[Training, float],
) -> bool:
    """Return True if a student may well keep the share once it is finished."""
    training: Training = "long" if "long" in rung.looks else "brief"
    look = rung.looks[training]
    chance = foresee(look, gains[training], keep)
    return chance >= min(WORTH_TRAINING, look.required)


def _check_share(job: Job, evaluator: Evaluator) -> None:
    """Raise PruneError if guessing keeps the share."""
    check = job.check
    keep = job.models.recipe.target.keep
    assert check is not None and keep is not None, "the teacher was checked first"
    metric = evaluator.task.metric
    wanted = keep * check.scores[metric]
    if wanted <= check.majority[metric]:
        raise PruneError(
            f"--keep {keep:.1%}: is {metric} {wanted:.3f} for this teacher, and "
            f"{evaluator.task.naive} gets {check.majority[metric]:.3f}: ask for more"
        )
