"""The options that commands and functions share: each with its default and its help, the groups as dataclasses.

On the command line the fields of a group are options of their own (`compress.cli.options.grouped`); in Python the group
is one argument: compress.distill(..., options=RunOptions(seed=1, resume=True)). This module does not import torch.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

PANELS = ("Data", "Training", "Budget", "Device", "Search", "Output")
"""The groups that options are listed in."""
data_option, training, budget, device_option, search_option, output = (
    partial(typer.Option, rich_help_panel=panel) for panel in PANELS
)

Teacher = Annotated[str, training(help="The teacher: an alias (minilm, bert-base, ...), a folder or a hub id.")]
Recipe = Annotated[
    str, training(help="The recipe: auto, a name (see `compress recipes`), or the path of a .yaml file.")
]
Overrides = Annotated[
    list[str] | None, training("--set", help="Change a number, such as stages.0.lr=3e-5. Repeatable.")
]
Seed = Annotated[int, training(help="Seed every random number of the run.")]
Precision = Annotated[Literal["auto", "bf16", "fp32"], training(help="Compute in this number format.")]
Track = Annotated[
    Literal["tensorboard", "mlflow", "wandb", "trackio"] | None,
    output(help="Show each stage in this tracker too; its files go to --out unless it is told of a server."),
]
Resume = Annotated[bool, training("--resume", help="Continue the interrupted run in --out.")]
AllowPickle = Annotated[bool, training("--allow-pickle", help="Accept pickled weights that you trust.")]
AllowCode = Annotated[
    str | None, training(help="Allow the recipe to run your own functions from this folder: it is a program then.")
]
OnWeakTeacher = Annotated[
    Literal["refuse", "warn"], training(help="Choose what a teacher no better than the majority leads to.")
]
DataName = Annotated[
    str, data_option(help="The data: intents, a folder with train and dev files, or a hub id such as glue/sst2.")
]
CorpusName = Annotated[str | None, data_option(help="Add unlabelled text: pydoc, a file, a folder or a hub id.")]
TextColumns = Annotated[list[str] | None, data_option(help="Name the text column; give it twice for pairs.")]
LabelColumn = Annotated[str | None, data_option(help="Name the label column.")]
Kind = Annotated[
    Literal["classification", "multilabel", "regression", "tagging", "qa"] | None,
    data_option(help="Name the kind of task where it is not detected."),
]
Metric = Annotated[str | None, data_option(help="Choose the best checkpoint by this score.")]
Out = Annotated[Path | None, output(help="The folder of the run; default: a new one, runs/RECIPE-DATA-N.")]
Int8MaxDrop = Annotated[
    float | None,
    output("--max-drop", min=0, max=100,
           help="Points of the score that int8 may lose; default: 0.2, or 0.5 under a latency budget."),
]  # fmt: skip
MaxDrop = Annotated[float, output("--max-drop", min=0, max=100, help="Points of the score that int8 may lose.")]
Plan = Annotated[bool, output("--plan", help="Try each stage for seconds, tell minutes and memory, and stop.")]
Wide = Annotated[bool, output("--wide", help="Show all columns, however wide the terminal is.")]
Json = Annotated[bool, output("--json", help="Print the result as JSON.")]
DeviceName = Annotated[
    str, device_option(help="Measure on this device: local, ssh:[user@]host[:port], browser, adb or adb:SERIAL.")
]
Lan = Annotated[bool, device_option("--lan", help="Allow a browser on another machine, such as a phone, to connect.")]
DeviceTimeout = Annotated[
    float, device_option("--timeout", min=0.1, help="Give up a silent device after so many seconds.")
]
DevicePython = Annotated[
    str, device_option("--python", help="Use this interpreter on an ssh host; it has onnxruntime.")
]
ThreadCounts = Annotated[
    str, device_option("--threads", help="Measure with these numbers of threads, comma-separated.")
]
BatchSizes = Annotated[str, device_option("--batch", help="Measure with these batch sizes, comma-separated.")]
Lengths = Annotated[str, device_option("--seq", help="Measure at these lengths in tokens, comma-separated.")]
Threads = Annotated[int, device_option(min=1, help="Measure with so many threads.")]
Batch = Annotated[int, device_option(min=1, help="Measure with batches of so many texts.")]
Affinity = Annotated[str, device_option(help="Keep to these CPUs, such as 0-3; not in a browser.")]
Native = Annotated[
    Path | None, device_option(help="adb: run this onnxruntime_perf_test or benchmark_model on the phone.")
]
Assets = Annotated[
    Path | None, device_option(help="browser, adb: take onnxruntime-web from this tarball or folder instead of npm.")
]
WebGpu = Annotated[bool, device_option("--webgpu", help="browser, adb: run on the GPU what it has kernels for.")]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The columns of the data, its kind of task and its score, where they are not to be detected."""

    text: TextColumns = None
    label: LabelColumn = None
    kind: Kind = None
    metric: Metric = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The settings of a run: how it computes and continues, and which code and files it may load.

    overrides  changes of numbers, such as `stages.0.lr=3e-5`, of a recipe or space that is given by name or file
    gate       what a teacher that is no better than the majority answer leads to
    track      a tracker that shows what is trained, besides the run's own log and TensorBoard's files
    """

    overrides: Overrides = None
    seed: Seed = 0
    precision: Precision = "auto"
    resume: Resume = False
    gate: OnWeakTeacher = "refuse"
    allow_pickle: AllowPickle = False
    allow_code: AllowCode = None
    track: Track = None


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Say how long a recipe's stages train.

    paper    take the numbers of the recipe's paper where the recipe's own fit any data
    effort   how long stages train whose end the validation split decides (`epochs: auto`); None: as the recipe says
    minutes  of training and all else, about; stages that would take longer end sooner, their rate at zero all the same
    """

    paper: Annotated[bool, training("--paper", help="Train as long, and at the rates, that the paper says.")] = False
    effort: Annotated[
        Literal["quick", "normal", "best"] | None, training(help="Train for less or more than the usual time.")
    ] = None
    minutes: Annotated[float | None, training(min=0.1, help="Take about so many minutes for everything.")] = None

    @property
    def minutes_alone(self) -> "LengthOptions":
        """Return what is left of them once a recipe has the rest."""
        return LengthOptions(minutes=self.minutes)


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device that latency is measured on, and how it is reached: see `compress.benchmark.devices.open_device`."""

    device: DeviceName = "local"
    lan: Lan = False
    timeout: DeviceTimeout = 60.0
    python: DevicePython = "python3"
    affinity: Affinity = ""
    native: Native = None
    assets: Assets = None
    webgpu: WebGpu = False


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(DeviceOptions):
    """The measurement of a search: the file and the setting, and how many shapes predict the latency of all others.

    seq  tokens of a text; None: 128, or the space's max_length if that is less
    """

    threads: Threads = 1
    batch: Batch = 1
    seq: Annotated[
        int | None, device_option(min=1, help="Measure at so many tokens; default: 128, or the space's max_length.")
    ] = None
    file: Annotated[Literal["int8", "fp32"], device_option(help="Measure and ship this file.")] = "int8"
    shapes: Annotated[int, device_option(help="Measure so many shapes, 5 to 64, to predict the others.")] = 16
    rounds: Annotated[int, device_option(min=2, help="Measure in so many interleaved rounds.")] = 4
    runs: Annotated[int, device_option(min=1, help="Time so many runs in each round.")] = 10


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """The study of a search: how it draws shapes and chooses among them, and where it is kept.

    objective  what the front is over beside the score; None: latency
    trials     shapes that are scored; None: as many as `minutes` allow, or 200 (plain spaces: 24)
    storage    the path of an SQLite file, or the URL of a database that workers reach; None: a file in the search's
               folder
    name       the name of the study; None: the name of the folder
    """

    objective: Annotated[
        list[str] | None, budget(help="Optimise latency, parameters, flops_per_token or file_mb. Repeatable.")
    ] = None
    anchor: Annotated[list[str] | None, output(help="Compare with this bundle of the same task. Repeatable.")] = None
    sampler: Annotated[str, search_option(help="Draw shapes by tpe, nsga2, gp or random.")] = "tpe"
    trials: Annotated[int | None, search_option(help="Score so many shapes; default: 200, plain 24.")] = None
    minutes: Annotated[
        float | None, search_option(help="Take so many minutes for everything, instead of what the stages say.")
    ] = None
    finalists: Annotated[int, search_option(help="Rank so many again after a short distillation.")] = 8
    winners: Annotated[int, search_option(help="Distil so many fully.")] = 1
    storage: Annotated[
        str | None,
        search_option(help="The study's database: an SQLite file or postgresql://...; default: in --out."),
    ] = None
    name: Annotated[
        str | None, search_option(help="The name of the study in its storage; default: the folder's name.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The limits of one student of a search; None: there is none.

    speedup      so many times faster than its teacher at least, both measured in one race
    max_file_mb  10^6 bytes of the file that ships
    min_score    the least it must score, in the task's metric
    """

    max_latency_ms: Annotated[float | None, budget(help="Limit the latency of its file on --device.")] = None
    speedup: Annotated[
        float | None, budget(help="Ask for so many times the speed of the teacher's file of that precision.")
    ] = None
    max_params: Annotated[float | None, budget(help="Limit its parameters, such as 5e6.")] = None
    max_file_mb: Annotated[float | None, budget(help="Limit the size of its file.")] = None
    min_score: Annotated[float | None, budget(help="Ask for this score on the validation split.")] = None


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """The sizes that a pruned model keeps, or the limits that decide them. A size that is not named stays.

    layers ... bottleneck   counts, or shares below 1 of the model's
    max_latency_ms          milliseconds that one forward of the int8 file may take
    speedup                 over the unpruned model's own int8 file
    """

    layers: Annotated[
        float | None, budget(help="Keep so many layers; below 1, a share of the model's, as for all sizes.")
    ] = None
    hidden: Annotated[float | None, budget(help="Keep this width.")] = None
    heads: Annotated[float | None, budget(help="Keep so many attention heads in each layer.")] = None
    ffn: Annotated[float | None, budget(help="Keep so many neurons in each feed-forward block.")] = None
    embedding: Annotated[float | None, budget(help="Keep this embedding width, where it is not the model's width.")] = (
        None
    )
    bottleneck: Annotated[float | None, budget(help="Keep this inner width (MobileBERT).")] = None
    max_latency_ms: Annotated[
        float | None, budget(help="Instead of sizes: prune until the int8 file takes so many ms on --device.")
    ] = None
    speedup: Annotated[
        float | None, budget(help="Instead of sizes: prune until it is so many times faster than the model there.")
    ] = None
    max_params: Annotated[
        float | None, budget(help="Instead of sizes, or with a latency: keep at most so many parameters, such as 5e6.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """The device and the setting that a budget of latency is of. seq: tokens; None: the recipe's max_length."""

    device: DeviceName = "local"
    threads: Threads = 1
    batch: Batch = 1
    seq: Annotated[
        int | None, device_option(min=1, help="Measure at so many tokens; default: the recipe's max_length.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Int8Options:
    """The calibration and the form of an int8 file.

    calibration   static, smoothquant: None takes the one that comes nearest (smoothquant: minmax)
    rows          rows of the train split to calibrate on
    form          fused for onnxruntime on CPUs, qdq for other runtimes
    """

    calibration: Annotated[
        Literal["minmax", "percentile", "entropy"] | None,
        training(help="Calibrate in this way; default: what comes nearest to fp32."),
    ] = None
    percentile: Annotated[float, training(min=50, max=100, help="The percentile of --calibration percentile.")] = 99.99
    rows: Annotated[int, training(min=1, help="Calibrate on so many rows of the train split.")] = 512
    form: Annotated[
        Literal["fused", "qdq"], output(help="Write the form for onnxruntime on CPUs, or for other runtimes.")
    ] = "fused"
    reduce_range: Annotated[
        bool, output("--reduce-range", help="Use 7-bit weights, for x86 processors without VNNI.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The reading of a checkpoint that is no bundle: see `compress.exporters.checkpoint.load_source`."""

    pair: Annotated[bool, data_option("--pair", help="Say that a checkpoint's classifier reads two texts.")] = False
    pool: Annotated[
        Literal["mean", "cls", "max"] | None, output(help="Make one vector of an encoder's tokens in this way.")
    ] = None
    normalise: Annotated[bool, output("--normalise", help="Give such vectors length 1.")] = False
    max_length: Annotated[int | None, output(min=1, help="Cut the texts of a checkpoint to so many tokens.")] = None
    allow_pickle: AllowPickle = False
