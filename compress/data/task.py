"""Define tasks and their data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from compress import kinds
from compress.arguments import check_arguments
from compress.data.schema import Names
from compress.data.text_preparation import AS_IT_IS, TextPreparation
from compress.errors import DataError, did_you_mean
from compress.kinds import Kind
from compress.records.class_scores import ClassScore

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

    from compress.arrays import Array, Doubles, Longs
    from compress.data.answers import AnswerColumns, Outcome, Prediction

Thresholds = tuple[float | None, float | None]
"""The thresholds of two models: see `Task.scores`."""


@check_arguments
@dataclass(frozen=True)
class Task:
    """Describe a prediction task over a text, a pair of texts, the words of a sentence,
    or a question and its context.

    This is the base of the kinds of task, one class each in `compress/tasks/`: whatever
    differs between them is a method or a class variable here, and no other code
    compares kinds. `Task("ranking", ...)` makes an object of the class of rankings.

    kind    classification (one of `labels`), multilabel (any of `labels`), regression
            (a number), tagging (one of `labels` for every word), qa (a span of the
            context that answers the question), embedding (a vector, near those of texts
            with a similar meaning), ranking (a number for a query and a passage;
            passages of a query rank by it, highest first), generation (a text); or the
            dotted path of the user's own module
    text    the names of the one or two text columns in the source
    label   the name of the label column in the source; several 0/1 columns are joined
            by commas
    labels  the class names in the order of the logits, for tagging IOB2 tags; empty for
            other kinds
    metric  the score that chooses the best checkpoint, higher is better: one of
            `metrics`
    unanswerable    qa: some questions have no answer in their context, and the model
                    may give none
    width   embedding: the size of a vector, as the teacher's; 0 until the teacher is
            known
    preparation    embedding: the prompts of the teacher, which its texts and those of
                   its students get
    """

    kind: Kind
    text: Names
    label: str
    labels: Names
    metric: str
    unanswerable: bool = False
    width: int = 0
    preparation: TextPreparation = AS_IT_IS

    metrics: ClassVar[Names] = ()
    """The metrics that can choose a checkpoint; the first is the default."""
    tokenwise: ClassVar[bool] = False
    """Whether the model predicts for every token instead of once for the row."""
    numeric: ClassVar[bool] = False
    """Whether the model predicts a number."""

    has_labels: ClassVar[bool] = False
    """Whether the task has `labels`."""
    shares: ClassVar[Names] = ("accuracy", "exact")
    """The metrics that are a share of independent rows; no interval follows from the
    value of another."""

    def __new__(cls, kind: str = "", *_: object, **__: object) -> Task:
        """Make an object of the kind's own class, which `__init__` then fills."""
        if cls is Task and isinstance(kind, str) and kinds.is_kind(kind):
            return super().__new__(kinds.find(kind))
        return super().__new__(cls)  # `__init__` refuses what is no kind

    @classmethod
    def choose_metric(cls, metric: str | None) -> str:
        """Return the metric, or the default if it is None. Raises DataError for an
        unknown one."""
        if metric is not None and metric not in cls.metrics:
            raise DataError(
                f"metric {metric!r} does not score a {cls.kind} "  # type: ignore[misc]
                f"task.{did_you_mean(metric, cls.metrics)}"
            )
        return metric or cls.metrics[0]

    @property
    def outputs(self) -> int:
        """Count the logits per row, or per token if the task is `tokenwise`; for
        embeddings the size of the vector."""
        return self.width or len(self.labels) or 1

    @property
    def pair(self) -> bool:
        return len(self.text) == 2

    # How a source is read: see `data.load`, whose `DataRequest` is passed.

    many_labels: ClassVar[bool] = False
    """Whether each row has any number of `labels`."""
    label_column: ClassVar[str] = "label"
    """The column of a split that has the labels."""
    shares_texts: ClassVar[bool] = False
    """Whether splits may have texts in common."""
    longest_row: ClassVar[int] = 512
    """The longest length in tokens that `max_length: auto` chooses."""
    usual_length: ClassVar[int | None] = None
    """The tokens that a model reads if its checkpoint does not say; None if the lengths
    of the rows decide."""

    @classmethod
    def read_files(cls, request: Any) -> UnsavedTask | None:
        """Read the files of a source that can only be of this kind, or was requested as
        this kind; None for others."""
        return None

    @classmethod
    def read_tables(cls, request: Any) -> UnsavedTask | None:
        """Read the tables of a source that can only be of this kind, or was requested
        as this kind; None for texts with labels."""
        return None

    @classmethod
    def encode_labels(cls, labels: Any, coding: Any) -> Array:
        """Encode a `data.labels.LabelColumn`: (rows,) class ids, (rows,) numbers, or
        (rows, classes) of 0 and 1."""
        raise NotImplementedError

    def describe_label(self, label: Any) -> str:
        """Name the label that every row has."""
        return f"the number {label}"

    def count_classes(self, split: Dataset) -> Longs:
        """Count the rows, or words, of each class in a split."""
        import numpy as np

        labels = split.data.table[self.label_column]
        return np.bincount(labels.to_numpy(), minlength=len(self.labels))

    # Heads, losses and rows. Class methods, because sometimes only the kind is known.

    head: ClassVar[str] = "AutoModelForSequenceClassification"
    """The Auto class of models for the task."""
    problem: ClassVar[str | None] = None
    """The `problem_type` of a sequence classifier's config; other heads have none."""
    vectors: ClassVar[bool] = False
    """Whether the answer is a vector, and there are no labels."""
    one_label: ClassVar[bool] = False
    """Whether each row has one of `labels`."""
    word_labels: ClassVar[bool] = False
    """Whether each word has one of `labels`."""
    one_word: ClassVar[bool] = False
    """Whether a word, or a number, is the whole answer."""
    writes: ClassVar[bool] = False
    """Whether the answer is a text, which the column `label` has unchanged."""
    takes_texts: ClassVar[bool] = True
    """Whether a single text that a teacher labels can be a row."""
    scaled: ClassVar[bool] = False
    """Whether labels are numbers on any scale, to which a new head is initialised."""
    own_loss: ClassVar[str] = "bert.labels"
    """The task's own loss, which `bert.labels` stands for in a recipe."""

    @classmethod
    def auto_class(cls) -> Any:
        """Return the Auto class of models for the task, which `loader.load_model`
        takes."""
        import transformers

        return getattr(transformers, cls.head)

    @classmethod
    def count_outputs(cls, config: Any) -> int:
        """Count the outputs of a model of this config."""
        return len(config.id2label or {})

    @property
    def output_names(self) -> Names:
        """Name the outputs of the head for a config."""
        return self.labels or ("score",)

    @classmethod
    def standard_labels(cls, names: Sequence[str], place: str) -> Names:
        """Convert the labels of a checkpoint or of a file to the form of `labels`."""
        return tuple(names)

    def match_labels(self, names: Sequence[str]) -> list[int] | None:
        """Return the place of each of `labels` among a model's names for them, or None
        if they are not the same labels.

        Case does not count, nor "-" for "_"; LABEL_0, LABEL_1, ... name places.
        """
        for spell in (str, fold_label):
            theirs = {spell(name): place for place, name in enumerate(names)}
            ours = [spell(label) for label in self.labels]
            if theirs.keys() == {*ours} and len(ours) == len(theirs) == len(names):
                return [theirs[label] for label in ours]
        places = list(range(len(self.labels)))
        return places if {*names} == {f"LABEL_{n}" for n in places} else None

    @classmethod
    def spread(cls, values: Any, mask_BL: Any) -> Any:
        """Reshape the logits or labels of a batch, so that a loss per example can
        average over them."""
        return values

    @classmethod
    def distributions(cls, logits: Any, mask_BL: Any) -> Any:
        """Return one distribution, or one number, per row: per example, per token, or
        per start and end."""
        return logits[mask_BL.bool()] if logits.dim() == 3 else logits

    def explain_errors(self, exam: Any, logits: Array) -> str:
        """Explain what is wrong with a teacher that fails `check_teacher`, if its
        answers show it."""
        return ""

    # What a bundle writes and answers. `predictor` is an
    # `exporters.predictor.Predictor`.

    graph_outputs: ClassVar[Names] = ("logits",)
    """The outputs of an exported file that hold the answer."""
    graph_spans: ClassVar[Names] = ()
    """The outputs of a text file on characters, besides the answer."""
    form: ClassVar[str] = "number"
    """The function of `exporters.tokenizer.forms` that adds the answer to a graph."""
    columns: ClassVar[Names] = ()
    """The columns of a file of answers besides `prediction`."""
    json_columns: ClassVar[Names] = ()
    """Further columns, of objects, which only jsonl can hold."""
    shows: ClassVar[bool] = True
    """Whether the rows of a source show this kind."""
    pipeline: ClassVar[str] = "text-classification"
    """The hub's pipeline tag."""
    hub_tag: ClassVar[str] = ""
    """The hub's tag of tasks for which its libraries have no pipeline."""
    headline: ClassVar[str] = "The model in this page labels what you type."
    """What the page of a demo says."""

    @property
    def samples(self) -> tuple[Names, ...]:
        """Return texts, or pairs of them, that the page of a demo offers to try."""
        texts = (
            "I forgot my password and cannot log in.",
            "A warm, funny film with a sharp plot.",
            "Will it rain in Dublin tomorrow?",
        )
        if not self.pair:
            return tuple((text,) for text in texts)
        return (
            ("A man is playing a guitar.", "Somebody plays an instrument."),
            ("A man is playing a guitar.", "The kitchen is empty."),
        )

    @property
    def answer_outputs(self) -> Names | None:
        """Return the outputs of a file that are needed if it has others too, or None
        for all of them."""
        return self.graph_outputs if self.vectors else None

    @property
    def example(self) -> str:
        """Write example texts in Python, for the card."""
        return '"first text", "second text"' if self.pair else '"a text"'

    @property
    def shell(self) -> str:
        """Write example texts for the command line."""
        return "'a text' --pair 'another'" if self.pair else "'a text'"

    def describe(self, threshold: float | None) -> str:
        """Say in a sentence what the model reads and answers, for the card."""
        reads = "a pair of texts" if self.pair else "one text"
        return f"It reads {reads} and {self.describe_answer()}"

    def describe_answer(self) -> str:
        """Say what the model answers."""
        return f"answers with one number ({self.label})."

    @classmethod
    def from_checkpoint(cls, source: Any, problem: str | None, text: Names) -> Task:
        """Read the task of a head from its config (`models.folder.ModelFolder`). Raises
        ExportError."""
        raise NotImplementedError

    def configure(self, config: Any, max_length: int) -> None:
        """Add to the config of a model what its bundle needs for this task."""

    def predict(self, predictor: Any, texts: Sequence[Any]) -> list[Outcome]:
        """Predict for each text, or pair of texts."""
        return list(map(self.answer, self.finite_logits(predictor, texts)))

    def finite_logits(self, predictor: Any, texts: Sequence[Any]) -> Doubles:
        """Compute the logits of texts (rows, outputs). Raises BundleError, which names
        the text, for logits that are not finite."""
        import numpy as np

        from compress.data.answers import check_finite

        logits = predictor.text_logits(texts)
        for row in np.flatnonzero(~np.isfinite(logits).all(axis=1)).tolist():
            check_finite(logits[row], f" for {texts[row]!r}")
        return logits.astype(np.float64)

    def answer_columns(self, predictor: Any, texts: Sequence[Any]) -> AnswerColumns:
        """Predict for texts as `predict` does, and return the columns of a file of
        answers."""
        from compress.data.answers import join_columns

        return join_columns(self.predict(predictor, texts))

    def answer_schema(self) -> pa.Schema:
        """Return the Arrow types of `answer_columns`."""
        import pyarrow as pa

        from compress.data.answers import label_schema

        if self.has_labels:
            return label_schema(self.labels)
        return pa.schema({"prediction": pa.float64()})

    def answer(self, logits: Doubles) -> Prediction:
        """Turn the logits of a text into an answer."""
        from compress.data.answers import Prediction

        return Prediction("", float(logits[0]), {})

    @classmethod
    def longest_question(cls, max_length: int) -> int | None:
        """Return the most tokens of the first text of a row, if it is cut by itself."""
        return None

    @classmethod
    def graph_row(cls, encoder: Any, frame: Any, text: Any) -> Mapping[str, Any]:
        """Encode a text as the row of a text file (`exporters.tokenizer.build`). A text
        that takes several rows is truncated to one."""
        (row,) = encoder.encode([text], frame.max_length)
        found: Mapping[str, Any] = row
        return found

    @classmethod
    def read_graph(
        cls, text: Any, outputs: Mapping[str, Any], labels: Sequence[str]
    ) -> Outcome:
        """Read the answer of a text file."""
        from compress.data.answers import Prediction

        if cls.has_labels:
            return Prediction.from_graph(outputs, labels)
        return Prediction("", float(outputs["score"]), {})

    # What scores are computed over. `exam` is an `evaluation.evaluator.Evaluator`: a
    # split, its rows, and views of both.

    unit: ClassVar[tuple[str, str]] = ("row", "rows")
    """What a split consists of, in the singular and the plural."""
    class_word: ClassVar[str] = "class"
    """What `by_class` scores, in the singular."""
    naive: ClassVar[str] = "always giving the most frequent answer"
    """What the baseline `majority` does."""
    ranks: ClassVar[bool] = False
    """Whether only the order of the answers to the rows of a query counts."""

    @classmethod
    def scored_unit(cls, metric: str) -> str:
        """Return what a metric is computed over, in the plural."""
        return "rows"

    @classmethod
    def averages_classes(cls, metric: str, labels: int) -> bool:
        """Check whether a metric is the mean F1 over `count` classes."""
        return False

    def count_rows(self, split: Dataset) -> int:
        """Count what `unit` names."""
        return len(split)

    def count_examples(self, split: Dataset) -> int:
        """Count the examples of a split that the metric is computed over."""
        return len(split)

    def choose_examples(self, exam: Any, count: int) -> Array:
        """Choose at most `count` examples, evenly spaced."""
        from compress.arrays import spaced

        return spaced(len(exam), count)

    def thin(self, split: Dataset, count: int) -> Dataset:
        """Keep at most `count` rows of a split, evenly spaced."""
        from compress.arrays import spaced

        return split.select(spaced(len(split), count))

    def subsample(self, exam: Any, count: int) -> Array:
        """Choose examples of at most `count` rows, evenly spaced."""
        return self.choose_examples(exam, count)

    def select(self, exam: Any, examples: Array) -> tuple[Dataset, Array]:
        """Select examples; return them as a split, and the numbers of their rows."""
        rows = exam.rows_of(examples) if self.tokenwise else examples
        return exam.split.select(examples), rows

    def scores(
        self, exam: Any, logits: Array, threshold: float | None
    ) -> dict[str, float]:
        """Compute every metric by name.

        threshold   qa: the margin over the best span from which no answer is given
        """
        return self.score_rows(logits, exam.labels)

    def score_rows(self, logits: Array, labels: Array) -> dict[str, float]:
        """Compute every metric by name, from the labels of the rows.

        Raises CompressError for logits that are not finite or do not match the labels,
        DataError for invalid labels. A metric that constant predictions leave undefined
        is 0.0.
        """
        raise NotImplementedError

    def by_class(self, exam: Any, logits: Array) -> tuple[ClassScore, ...]:
        """Score each label, or each type of entity; () for tasks without labels."""
        return ()

    def decide(self, exam: Any, logits: Array, threshold: float | None) -> Array | None:
        """Return what the model decides for each example, or each part of one: (N,) or
        (N, parts), or None if every answer differs slightly."""
        return None

    def agreement(
        self, exam: Any, student: Array, teacher: Array, thresholds: Thresholds
    ) -> float:
        """Measure how often the student predicts what the teacher predicts: by default
        the share of equal decisions."""
        one = self.decide(exam, student, thresholds[0])
        same: Any = one == self.decide(exam, teacher, thresholds[1])
        return float(same.mean())

    def count_changed(
        self, exam: Any, student: Array, teacher: Array, thresholds: Thresholds
    ) -> int | None:
        """Count the examples with a different decision; None if every prediction
        differs slightly."""
        one = self.decide(exam, student, thresholds[0])
        other = self.decide(exam, teacher, thresholds[1])
        if one is None or other is None:
            return None
        return int((one != other).reshape(len(one), -1).any(axis=1).sum())

    def distance(self, exam: Any, student: Array, teacher: Array) -> float:
        """Measure how far the student's logits are from the teacher's, by default as
        mean squared difference. It is smooth; `agreement` is a count."""
        return float(((student - teacher) ** 2).mean())

    def list_answers(
        self, exam: Any, logits: Array, threshold: float | None
    ) -> list[Any]:
        """List the answer to each example: the tags of a sentence, or the text that
        answers a question, normalised as the score normalises it."""
        raise NotImplementedError

    def example_scores(
        self, exam: Any, logits: Array, threshold: float | None
    ) -> Array | None:
        """Compute the value of each example if the metric is their mean, else None."""
        return None

    def metric_of_examples(
        self, exam: Any, logits: Array
    ) -> tuple[Callable[[Array], float], int]:
        """Return a function that computes the metric over examples, given by their
        numbers (which may repeat), and the number of examples."""

        def score(drawn: Array) -> float:
            return self.score_rows(logits[drawn], exam.labels[drawn])[self.metric]

        return score, len(exam)

    def choose_threshold(self, exam: Any, logits: Array) -> float:
        """Choose the threshold with the highest score: see `scores`."""
        return 0.0

    def baselines(self, data: TaskData, split: Dataset) -> dict[str, dict[str, float]]:
        """Score predictions without a neural model, by the name that tables show."""
        return {"majority": self.majority(data, split)}

    def majority(self, data: TaskData, split: Dataset) -> dict[str, float]:
        """Score a constant prediction, which the labelled split determines."""
        import numpy as np

        known = np.asarray(data.labelled["label"][:])
        labels = np.asarray(split["label"][:])
        constant = np.tile(self.constant(known), (len(labels), 1))
        return self.score_rows(constant, labels)

    def constant(self, labels: Array) -> Array:
        """Return the logits of the best constant prediction for these labels."""
        raise NotImplementedError

    def fit_linear(self, features: Any, labels: Array, inputs: Any) -> Array:
        """Fit linear models to sparse features and labels; return the logits of
        `inputs`."""
        raise NotImplementedError

    def lead(
        self, data: TaskData, exam: Any, logits: Array
    ) -> tuple[float, float] | None:
        """Return by how much the logits score above `majority`, and its standard error,
        or None if it has to be estimated by leaving examples out."""
        return None


def fold_label(name: str) -> str:
    return name.casefold().replace("-", "_")


@check_arguments
@dataclass(frozen=True)
class TaskData:
    """Hold a task with its splits.

    Every split has these columns, whatever the source calls them:

    text, text_pair (pairs only), label    the label is an int class id, a float, or a
                                           list of 0.0/1.0 floats (one per class),
                                           depending on the task
    words, tags                            tagging: lists of strings and of int class
                                           ids
    query                                  ranking: an int, the same for all passages of
                                           a query
    teacher                                ranking: a teacher's score of the passage, a
                                           float, if the source has them;
                                           classification: the logarithms of its
                                           probabilities, likewise
    id, question, context, answers, starts qa: the correct answers, and where each
    begins in the context, in
                                           characters; empty lists if the context has no
                                           answer
    text, related, relevance, scores,      embedding: a text; the numbers of the rows
                                           that it is judged with, their
    passage                                relevance, and a teacher's scores of them, if
                                           there are any; whether it is a passage that
                                           queries retrieve (if no row is, texts are
                                           compared in pairs). See `data.embedding`

    `test` is None if the source has no labelled test split. `fingerprint` changes when
    any row or class name does. `notes` tell the user which splits were made or skipped,
    and what was guessed.
    """

    name: str
    task: Task
    train: Dataset
    validation: Dataset
    test: Dataset | None
    fingerprint: str
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[str, Dataset]:
        """Return the split that models are measured on, with its name: test, or
        validation if there is no labelled test split."""
        if self.test is None:
            return "validation", self.validation
        return "test", self.test

    @property
    def labelled(self) -> Dataset:
        """Return the training split, or the validation split if that has no labels."""
        return self.train if "label" in self.train.column_names else self.validation

    @property
    def label_scale(self) -> tuple[float, float]:
        """Return the mean and the standard deviation of a regression's labels; 1 if
        they are all the same."""
        from statistics import fmean  # slow to import, and not needed to predict

        labels = self.labelled["label"][:]
        mean = fmean(labels)
        return mean, sqrt(fmean((label - mean) ** 2 for label in labels)) or 1.0


class UnsavedTask(NamedTuple):
    """Hold a task before its splits are written to the cache."""

    name: str
    task: Task
    batches: Mapping[Any, Iterable[pa.RecordBatch]]
    notes: Sequence[str]


class Examples(NamedTuple):
    """Hold the examples of a file: a table of the kind's columns in TaskData (with tags
    by name), the group of each row (a group is held out as a whole), and notes for the
    user."""

    table: pa.Table
    groups: list[int]
    notes: tuple[str, ...] = ()


def join_examples(parts: Sequence[Examples]) -> Examples:
    """Join the examples of shards, with groups of their own."""
    import pyarrow as pa

    groups = list[int]()
    for part in parts:
        first = max(groups, default=-1) + 1
        groups += [first + group for group in part.groups]
    notes = tuple(note for part in parts for note in part.notes)
    return Examples(pa.concat_tables(part.table for part in parts), groups, notes)
