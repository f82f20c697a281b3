"""The options that commands and functions share: each with its default and its help, the groups as dataclasses.

On the command line the fields of a group are options (`compress.cli.options.with_option_groups`); in Python the group
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

Teacher = Annotated[str, training(help="minilm, an alias, a folder or a hub id.")]
Recipe = Annotated[str, training(help="auto, a name of `compress recipes`, or a .yaml.")]
Overrides = Annotated[list[str] | None, training("--set", help="Change a number: stages.0.lr=3e-5. Repeatable.")]
Seed = Annotated[int, training(help="Seed every random number of the run.")]
Precision = Annotated[Literal["auto", "bf16", "fp32"], training(help="Compute in this format")]
Track = Annotated[
    Literal["tensorboard", "mlflow", "wandb", "trackio"] | None,
    output(help="Show each stage in this tracker too."),
]
Resume = Annotated[bool, training("--resume", help="Continue the interrupted run in --out.")]
AllowPickle = Annotated[bool, training("--allow-pickle", help="Accept pickled weights that you trust.")]
AllowCode = Annotated[str | None, training(help="Let the recipe run code of yours in this folder.")]
OnWeakTeacher = Annotated[Literal["refuse", "warn"], training(help="A teacher no better than the majority.")]
DataName = Annotated[str, data_option(help="intents, a folder of train and dev files, or a hub id.")]
CorpusName = Annotated[str | None, data_option(help="Add unlabelled text: pydoc, a file, folder, hub id.")]
TextColumns = Annotated[list[str] | None, data_option(help="Name the text column; twice for pairs.")]
LabelColumn = Annotated[str | None, data_option(help="Name the label column.")]
Kind = Annotated[
    Literal["classification", "multilabel", "regression", "tagging", "qa", "embedding", "ranking"] | None,
    data_option(help="Name the kind of task"),
]
Metric = Annotated[str | None, data_option(help="Choose the best checkpoint by this score.")]
Out = Annotated[Path | None, output(help="The run's folder; else a new runs/RECIPE-DATA-N.")]
Int8MaxDrop = Annotated[
    float | None,
    output("--max-drop", min=0, max=100,
           help="Points int8 may lose; 0.2, or 0.5 for a latency."),
]  # fmt: skip
MaxDrop = Annotated[float, output("--max-drop", min=0, max=100, help="Points of the score that int8 may lose.")]
Plan = Annotated[bool, output("--plan", help="Tell minutes, memory, disk by short trials; stop.")]
Wide = Annotated[bool, output("--wide", help="Show all columns, however wide.")]
Json = Annotated[bool, output("--json", help="Print the result as JSON.")]
DeviceName = Annotated[str, device_option(help="local, browser, adb[:SERIAL], ssh:[user@]host[:port].")]
Lan = Annotated[bool, device_option("--lan", help="Let a browser on another machine connect.")]
DeviceTimeout = Annotated[float, device_option("--timeout", min=0.1, help="Seconds that a device may be silent.")]
DevicePython = Annotated[str, device_option("--python", help="ssh: the interpreter with onnxruntime there.")]
ThreadCounts = Annotated[str, device_option("--threads", help="Numbers of threads, such as 1,4.")]
BatchSizes = Annotated[str, device_option("--batch", help="Batch sizes, such as 1,8.")]
Lengths = Annotated[str, device_option("--seq", help="Lengths in tokens, such as 32,128.")]
Threads = Annotated[int, device_option(min=1, help="Measure with so many threads.")]
Batch = Annotated[int, device_option(min=1, help="Measure with so many texts at once.")]
Affinity = Annotated[str, device_option(help="Keep to these CPUs, as 0-3; not in a browser.")]
Native = Annotated[Path | None, device_option(help="adb: this onnxruntime_perf_test, benchmark_model.")]
Assets = Annotated[Path | None, device_option(help="onnxruntime-web as a tarball or folder, for npm's.")]
WebGpu = Annotated[bool, device_option("--webgpu", help="browser, adb: run on the GPU what it can.")]


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

    paper: Annotated[bool, training("--paper", help="Train as long, at such rates, as the paper.")] = False
    effort: Annotated[Literal["quick", "normal", "best"] | None, training(help="Train for less, or more")] = None
    minutes: Annotated[float | None, training(min=0.1, help="Take about so many minutes in all.")] = None

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
    seq: Annotated[int | None, device_option(min=1, help="Tokens; default: 128, or the space's max_length.")] = None
    file: Annotated[Literal["int8", "fp32"], device_option(help="Measure and ship this file.")] = "int8"
    shapes: Annotated[int, device_option(help="Measure so many shapes, 5 to 64.")] = 16
    rounds: Annotated[int, device_option(min=2, help="Measure in so many rounds.")] = 4
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
        list[str] | None, budget(help="Minimise this (latency, parameters, flops_per_token, file_mb). Repeatable.")
    ] = None
    anchor: Annotated[list[str] | None, output(help="Compare with this bundle too. Repeatable.")] = None
    sampler: Annotated[str, search_option(help="Draw shapes by tpe, nsga2, gp or random.")] = "tpe"
    trials: Annotated[int | None, search_option(help="Score so many shapes; default: 200, plain 24.")] = None
    minutes: Annotated[float | None, search_option(help="Take so many minutes in all.")] = None
    finalists: Annotated[int, search_option(help="Distil so many briefly, to rank them.")] = 8
    winners: Annotated[int, search_option(help="Distil so many fully.")] = 1
    storage: Annotated[
        str | None,
        search_option(help="SQLite file or postgresql: URL; default: in --out."),
    ] = None
    name: Annotated[str | None, search_option(help="The study's name there; default: the folder's.")] = None


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The limits of one student of a search; None: there is none.

    speedup      so many times faster than its teacher at least, both measured in one race
    max_file_mb  10^6 bytes of the file that ships
    min_score    the least it must score, in the task's metric
    """

    max_latency_ms: Annotated[float | None, budget(help="Limit the latency of its file on --device.")] = None
    speedup: Annotated[float | None, budget(help="So many times the speed of the teacher's file.")] = None
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

    layers: Annotated[float | None, budget(help="Layers to keep; below 1, as all sizes, a share.")] = None
    hidden: Annotated[float | None, budget(help="Width to keep.")] = None
    heads: Annotated[float | None, budget(help="Attention heads to keep in each layer.")] = None
    ffn: Annotated[float | None, budget(help="Neurons to keep in each feed-forward block.")] = None
    embedding: Annotated[float | None, budget(help="Embedding width to keep, where it is another.")] = None
    bottleneck: Annotated[float | None, budget(help="Inner width to keep (MobileBERT).")] = None
    max_latency_ms: Annotated[float | None, budget(help="Instead of sizes: ms of the int8 file there.")] = None
    speedup: Annotated[float | None, budget(help="Instead of sizes: so many times as fast there.")] = None
    max_params: Annotated[float | None, budget(help="Instead of sizes, or with a latency; as 5e6.")] = None


@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """The device and the setting that a budget of latency is of. seq: tokens; None: the recipe's max_length."""

    device: DeviceName = "local"
    threads: Threads = 1
    batch: Batch = 1
    seq: Annotated[int | None, device_option(min=1, help="Tokens; default: the recipe's max_length.")] = None


@dataclass(frozen=True, kw_only=True)
class Int8Options:
    """The calibration and the form of an int8 file.

    calibration   static, smoothquant: None takes the one that comes nearest (smoothquant: minmax)
    rows          rows of the train split to calibrate on
    form          fused for onnxruntime on CPUs, qdq for other runtimes
    """

    calibration: Annotated[
        Literal["minmax", "percentile", "entropy"] | None,
        training(help="Instead of the nearest to fp32"),
    ] = None
    percentile: Annotated[float, training(min=50, max=100, help="Of --calibration percentile.")] = 99.99
    rows: Annotated[int, training(min=1, help="Calibrate on so many training rows.")] = 512
    form: Annotated[Literal["fused", "qdq"], output(help="fused: onnxruntime on CPUs; qdq: others.")] = "fused"
    reduce_range: Annotated[bool, output("--reduce-range", help="7-bit weights, for x86 without VNNI.")] = False


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The reading of a checkpoint that is no bundle: see `compress.exporters.checkpoint.load_source`."""

    pair: Annotated[bool, data_option("--pair", help="A checkpoint's classifier reads two texts.")] = False
    pool: Annotated[Literal["mean", "cls", "max"] | None, output(help="Make an encoder's tokens one vector.")] = None
    normalise: Annotated[bool, output("--normalise", help="Give such vectors length 1.")] = False
    max_length: Annotated[int | None, output(min=1, help="Tokens of a checkpoint's longest text.")] = None
    allow_pickle: AllowPickle = False
