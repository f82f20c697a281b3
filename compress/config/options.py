"""Define the options that commands and functions share, with defaults and help, in
groups.

On the command line the fields of a group are options
(`compress.cli.options.with_option_groups`); in Python the group is one argument:
compress.distill(..., options=RunOptions(seed=1, resume=True)). This module does not
import torch.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from compress import kinds
from compress.arguments import (
    BUNDLES,
    MINUTES,
    NAME_CHECK,
    PERCENT,
    SEEDS,
    check_arguments,
)
from compress.config import PANELS
from compress.errors import ArgumentError, RecipeError

data_option, training, budget, device_option, search_option, output = (
    partial(typer.Option, rich_help_panel=panel) for panel in PANELS
)

file_output = partial(output, dir_okay=False)
"""An option for a file to write, which cannot be a folder."""

TeacherOption = Annotated[
    str, training(help="An alias such as minilm, a folder, a hub id, or a .gguf file.")
]
RecipeOption = Annotated[
    str, training(help="auto, a name from `compress recipes`, or a .yaml file.")
]
Overrides = Annotated[
    list[str] | None,
    training("--set", help="Override a setting: stages.0.lr=3e-5. Repeatable."),
]
Seed = Annotated[int, training(help="Seed all random numbers of the run."), SEEDS]
PrecisionOption = Annotated[
    Literal["auto", "bf16", "fp32"], training(help="Compute in this format")
]
Resume = Annotated[
    bool, training("--resume", help="Continue the interrupted run in --out.")
]
AllowPickle = Annotated[
    bool, training("--allow-pickle", help="Allow pickled weights, if you trust them.")
]
AllowCode = Annotated[
    str | None,
    training(help="Allow your own code in this folder to run."),
    NAME_CHECK,
]
OnWeakTeacher = Annotated[
    Literal["refuse", "warn"],
    training(help="What to do if the teacher only guesses."),
]
DataName = Annotated[
    str,
    data_option(
        help="intents (embedded), a folder of train and dev files, or a hub id."
    ),
]
CorpusName = Annotated[
    str | None, data_option(help="Unlabelled text: pydoc, a file, folder or hub id.")
]
TextColumns = Annotated[
    list[str] | None, data_option(help="Text column; give it twice for pairs of texts.")
]
TaskKind = Annotated[
    str | None,
    data_option(
        help=f"Kind of task: {', '.join(kinds.names())}, or your module.",
        autocompletion=kinds.names,
    ),
    kinds.KindCheck(),
]
Out = Annotated[
    Path | None, output(help="The run's folder; default: a new runs/RECIPE-DATA-N.")
]
Vocabulary = Literal["auto", "full"]
VocabularyOption = Annotated[
    Vocabulary,
    output(help="full: keep tokens your texts never use."),
]
Int8MaxDrop = Annotated[
    float | None,
    output(
        "--max-drop",
        min=0,
        max=100,
        help="Maximum points int8 may lose; default: 0.2, or 0.5 with a latency "
        "budget.",
    ),
]
MaxDrop = Annotated[
    float,
    output("--max-drop", min=0, max=100, help="Maximum drop of the score, in points."),
]
MAX_DROP = 0.5
"""The default of `MaxDrop`."""
Plan = Annotated[
    bool, output("--plan", help="Estimate minutes, memory and disk; then stop.")
]
BundleFolder = Annotated[Path, typer.Argument(help="The folder of a bundle or a run.")]
AnsweringFile = Annotated[
    Literal["int8", "fp32", "fp16", "w8", "q4"], output(help="Answer with this file.")
]
Wide = Annotated[bool, output("--wide", help="Show all columns, however wide.")]
Json = Annotated[bool, output("--json", help="Print the result as JSON.")]
DeviceName = Annotated[
    str,
    device_option(help="local, browser, adb[:SERIAL], ssh:[user@]host[:port]."),
]
Lan = Annotated[
    bool, device_option("--lan", help="Let a browser on another machine connect.")
]
ThreadCounts = Annotated[
    str, device_option("--threads", help="Thread counts, such as 1,4.")
]
BatchSizes = Annotated[str, device_option("--batch", help="Batch sizes, such as 1,8.")]
Lengths = Annotated[
    str, device_option("--seq", help="Lengths in tokens, such as 32,128.")
]
Threads = Annotated[int, device_option(min=1, help="Measure with this many threads.")]
Batch = Annotated[
    int, device_option(min=1, help="Measure with this many texts at once.")
]
Assets = Annotated[
    Path | None, device_option(help="Folder or tarball of onnxruntime-web (else npm).")
]


@check_arguments
@dataclass(frozen=True, kw_only=True)
class PrintOptions:
    """Choose what a command prints: a forecast instead of its work, all columns of a
    table, JSON."""

    plan: Plan = False
    wide: Wide = False
    as_json: Json = False


@check_arguments
@dataclass(frozen=True, kw_only=True)
class ShipOptions:
    """Choose where a run writes its bundle, which tokens the student knows there, and
    how much of the score int8 may lose."""

    out: Out = None
    vocabulary: VocabularyOption = "auto"
    max_drop: Int8MaxDrop = None

    @property
    def limit(self) -> float | None:
        """Return the allowed drop, in the score's own unit."""
        return None if self.max_drop is None else self.max_drop / 100


@check_arguments
@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """The columns of the data, if they should not be detected."""

    text: TextColumns = None
    label: Annotated[str | None, data_option(help="Label column, or several: a,b.")] = (
        None
    )

    def refuse(self) -> None:
        """Raise ArgumentError for an option that is set: there are no data."""
        for each in fields(self):
            if getattr(self, each.name) != each.default:
                raise ArgumentError(each.name, "data that it describes", "none")


@check_arguments
@dataclass(frozen=True, kw_only=True)
class DataOptions(ColumnOptions):
    """The columns of the data, its kind of task and its score, if they should not be
    detected."""

    kind: TaskKind = None
    metric: Annotated[
        str | None, data_option(help="Metric that selects the best checkpoint.")
    ] = None


@check_arguments
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The settings of a run: how it computes and continues, and which code and files it
    may load.

    overrides  changes such as `stages.0.lr=3e-5` of a recipe or space that is given by
               name or file
    gate       what to do about a teacher that is no better than the majority answer
    track      a tracker to log to, besides the run's own log and TensorBoard's files
    """

    overrides: Overrides = None
    seed: Seed = 0
    precision: PrecisionOption = "auto"
    resume: Resume = False
    gate: OnWeakTeacher = "refuse"
    allow_pickle: AllowPickle = False
    allow_code: AllowCode = None
    track: Annotated[
        Literal["tensorboard", "mlflow", "wandb", "trackio"] | None,
        output(help="Log each stage to this tracker too."),
    ] = None

    def for_trial(self) -> "RunOptions":
        """Return the settings of a trial: a new run without a tracker."""
        return replace(self, resume=False, track=None)


@check_arguments
@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Choose how long a recipe's stages train.

    paper    use the paper's numbers instead of the recipe's own, which fit any data
    effort   how long to train stages that the validation split ends (`epochs: auto`);
             None: as in the recipe
    minutes  the approximate time for the whole run; stages end early to stay within it,
             with the learning rate still reaching zero
    """

    paper: Annotated[
        bool, training("--paper", help="Use the paper's training lengths and rates.")
    ] = False
    effort: Annotated[
        Literal["quick", "normal", "best"] | None,
        training(help="Train shorter or longer"),
    ] = None
    minutes: Annotated[
        float | None,
        training(min=0.1, help="Take about this many minutes in all."),
        MINUTES,
    ] = None


@check_arguments
@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device to measure latency on, and how to reach it: see
    `compress.benchmark.devices.open_device`."""

    device: DeviceName = "local"
    lan: Lan = False
    timeout: Annotated[
        float,
        device_option("--timeout", min=0.1, help="Seconds a device may stay silent."),
    ] = 60.0
    python: Annotated[
        str, device_option("--python", help="ssh: a Python with onnxruntime.")
    ] = "python3"
    affinity: Annotated[
        str, device_option(help="Pin to these CPUs, such as 0-3; not in a browser.")
    ] = ""
    native: Annotated[
        Path | None,
        device_option(help="adb: time with this program, not in a browser."),
    ] = None
    assets: Assets = None
    webgpu: Annotated[
        bool,
        device_option("--webgpu", help="browser, adb: use the GPU where possible."),
    ] = False


@check_arguments
@dataclass(frozen=True, kw_only=True)
class DeviceSettingOptions(DeviceOptions):
    """The device, and the setting at which it measures latency.

    seq  tokens of a text; None: 128, or the max_length of the space or the bundles if
         that is less
    """

    threads: Threads = 1
    batch: Batch = 1
    seq: Annotated[
        int | None,
        device_option(min=1, help="Tokens; default: 128, or the model's maximum."),
    ] = None


@check_arguments
@dataclass(frozen=True, kw_only=True)
class MeasureOptions(DeviceSettingOptions):
    """Choose what a search measures: file (None: the space's precisions, or int8),
    setting, and the number of shapes from which it predicts the others."""

    file: Annotated[
        Literal["int8", "fp32"] | None,
        device_option(help="Measure and ship this file, by default int8"),
    ] = None
    shapes: Annotated[int, device_option(help="Measure this many shapes, 5 to 64.")] = (
        16
    )
    rounds: Annotated[
        int, device_option(min=2, help="Measure in this many rounds.")
    ] = 4
    runs: Annotated[
        int, device_option(min=1, help="Time this many runs in each round.")
    ] = 10


@check_arguments
@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Choose how a search samples and selects shapes, and where it stores its study.

    objective  the objectives besides the score; None: latency
    trials     the number of shapes to score; None: as many as `minutes` allow, or 200
               (plain spaces: 24)
    storage    the path of an SQLite file, or the URL of a database that workers can
               reach; None: a file in the search's folder
    name       the name of the study; None: the name of the folder
    """

    objective: Annotated[
        list[str] | None,
        budget(
            help="Minimise this (latency, parameters, flops_per_token, file_mb). "
            "Repeatable."
        ),
    ] = None
    anchor: Annotated[
        list[str] | None,
        output(help="Compare with this bundle too. Repeatable."),
        BUNDLES,
    ] = None
    sampler: Annotated[
        Literal["tpe", "nsga2", "gp", "random"],
        search_option(help="Sampler of shapes"),
    ] = "tpe"
    trials: Annotated[
        int | None,
        search_option(min=1, help="Shapes to score; default: 200; plain spaces: 24."),
    ] = None
    minutes: Annotated[
        float | None,
        search_option(min=0.1, help="Take this many minutes in all."),
        MINUTES,
    ] = None
    finalists: Annotated[
        int, search_option(min=1, help="Distil this many briefly, to rank them.")
    ] = 8
    winners: Annotated[int, search_option(min=1, help="Distil this many fully.")] = 1
    storage: Annotated[
        str | None,
        search_option(help="SQLite file or postgresql: URL; default: in --out."),
        NAME_CHECK,
    ] = None
    name: Annotated[
        str | None, search_option(help="The study's name there; default: the folder's.")
    ] = None


@check_arguments
@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The limits of one student of a search; None: no limit.

    speedup      the minimum speed-up over its teacher, both measured in one race
    max_file_mb  the maximum size of the shipped file, in 10^6 bytes
    min_score    the minimum score in the task's metric
    """

    max_latency_ms: Annotated[
        float | None, budget(help="Maximum latency on --device, in milliseconds.")
    ] = None
    speedup: Annotated[
        float | None, budget(help="Minimum speed-up over the teacher's file.")
    ] = None
    max_params: Annotated[
        float | None, budget(help="Maximum number of parameters, such as 5e6.")
    ] = None
    max_file_mb: Annotated[
        float | None, budget(help="Maximum size of the student's file, in MB.")
    ] = None
    min_score: Annotated[
        float | None, budget(help="Minimum score on the validation split.")
    ] = None


@check_arguments
@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """Ask for the smallest student that keeps a share of its teacher's score.

    keep    the share, as 0.985 or "98.5%"; None: the recipe decides the student's sizes
    least   what to minimise: the latency or the size of its int8 file, or its
            parameters; None: as in the recipe, which by default minimises the latency
    """

    keep: Annotated[
        str | None,
        budget(metavar="SHARE", help="Keep this share of the score, such as 98.5%."),
        PERCENT,
    ] = None
    least: Annotated[
        Literal["latency", "mb", "params"] | None,
        budget(help="With --keep: minimise this, by default latency"),
    ] = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return the overrides that set this goal in a recipe. Raises RecipeError for
        `least` without `keep`."""
        if self.least is not None and self.keep is None:
            raise RecipeError(
                [
                    f"--least {self.least}: chooses among the students that keep a "
                    "share of the score; give --keep too"
                ]
            )
        return tuple(
            f"target.{name}={value}"
            for name, value in (("keep", self.keep), ("least", self.least))
            if value is not None
        )


@check_arguments
@dataclass(frozen=True, kw_only=True)
class PruneOptions(GoalOptions):
    """The sizes of a pruned model, or the limits that decide them. Sizes that are not
    given stay the same.

    layers ... bottleneck   counts, or shares below 1 of the model's
    max_latency_ms          the maximum milliseconds of a forward pass of the int8 file
    speedup                 over the unpruned model's own int8 file
    """

    layers: Annotated[
        float | None, budget(help="Layers to keep; sizes below 1 are shares.")
    ] = None
    hidden: Annotated[float | None, budget(help="Width to keep.")] = None
    heads: Annotated[
        float | None, budget(help="Attention heads to keep in each layer.")
    ] = None
    ffn: Annotated[
        float | None, budget(help="Neurons to keep in each feed-forward block.")
    ] = None
    embedding: Annotated[
        float | None, budget(help="Embedding width to keep, if it differs.")
    ] = None
    bottleneck: Annotated[
        float | None, budget(help="Inner width to keep (MobileBERT).")
    ] = None
    max_latency_ms: Annotated[
        float | None, budget(help="Instead of sizes: maximum ms of the int8 file.")
    ] = None
    speedup: Annotated[
        float | None, budget(help="Instead of sizes: this many times as fast.")
    ] = None
    max_params: Annotated[
        float | None, budget(help="Maximum parameters (5e6), alone or with a latency.")
    ] = None

    @property
    def values(self) -> dict[str, float]:
        """Return the sizes and the limits that are given, without the goal."""
        goal = asdict(self.goal)
        return {name: own for name, own in _given(self).items() if name not in goal}

    @property
    def goal(self) -> GoalOptions:
        """Return the goal, which replaces sizes and limits."""
        return GoalOptions(keep=self.keep, least=self.least)


@check_arguments
@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """The device and the setting of a latency budget; None: as in the recipe's target,
    or its default. seq: tokens, by default the recipe's max_length."""

    device: Annotated[
        str | None,
        device_option(help="local, browser, adb, ssh:host; default: the recipe's."),
    ] = None
    threads: Annotated[
        int | None, device_option(min=1, help="Threads; default: the recipe's, or 1.")
    ] = None
    batch: Annotated[
        int | None,
        device_option(min=1, help="Texts at once; default: the recipe's, or 1."),
    ] = None
    seq: Annotated[
        int | None,
        device_option(min=1, help="Tokens; default: the recipe's max_length."),
    ] = None

    @property
    def values(self) -> dict[str, Any]:
        """Return what is given."""
        return _given(self)


def _given(group: Any) -> dict[str, Any]:
    return {name: own for name, own in asdict(group).items() if own is not None}


@check_arguments
@dataclass(frozen=True, kw_only=True)
class Int8Options:
    """The calibration and the form of an int8 file.

    calibration   for static and smoothquant; None: the one that comes closest to fp32
                  (smoothquant: minmax)
    rows          rows of the train split to calibrate on
    form          fused for onnxruntime on CPUs, qdq for other runtimes
    target_cpu    any: the same sums on every processor; vnni: weights use all 8 bits,
                  which saturates on x86 processors without VNNI
    """

    calibration: Annotated[
        Literal["minmax", "percentile", "entropy"] | None,
        training(help="Use this method instead of the closest to fp32"),
    ] = None
    percentile: Annotated[
        float, training(min=50, max=100, help="For --calibration percentile.")
    ] = 99.99
    rows: Annotated[
        int, training(min=1, help="Calibrate on this many training rows.")
    ] = 512
    form: Annotated[
        Literal["fused", "qdq"],
        output(help="fused: for onnxruntime on CPUs; qdq: for others."),
    ] = "fused"
    target_cpu: Annotated[
        Literal["any", "vnni"],
        output(help="vnni: finer weights, wrong on x86 without VNNI."),
    ] = "any"

    @property
    def full_range(self) -> bool:
        """Return whether weights use all 8 bits."""
        return self.target_cpu == "vnni"


@check_arguments
@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Choose how to read a checkpoint that is not a bundle: see
    `compress.exporters.checkpoint.load_source`."""

    pair: Annotated[
        bool, data_option("--pair", help="A checkpoint's classifier reads text pairs.")
    ] = False
    pool: Annotated[
        Literal[
            "mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"
        ]
        | None,
        output(help="Pool an encoder's tokens into one vector."),
    ] = None
    normalise: Annotated[
        bool, output("--normalise", help="Normalise these vectors to length 1.")
    ] = False
    max_length: Annotated[
        int | None, output(min=1, help="Maximum tokens of a text for a checkpoint.")
    ] = None
    allow_pickle: AllowPickle = False
