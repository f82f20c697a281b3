"""Turn a text into a vector, near those of texts with a similar meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from compress.data.answers import AnswerColumns, Outcome, Vector
from compress.data.task import Task, TaskData, Thresholds, UnsavedTask
from compress.evaluation import embedding
from compress.evaluation.metrics import Scores
from compress.evaluation.ranking import MEASURES

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

    from compress.arrays import Array
    from compress.data.encoder import Text
    from compress.data.load import DataRequest
    from compress.evaluation.evaluator import Evaluator
    from compress.models.sentence_settings import SentenceSettings


class Embedding(Task):
    """Give a vector of `width` numbers.

    spearman and pearson of the cosines of pairs, or how well queries retrieve passages:
    see `evaluation.embedding`
    """

    kind = "embedding"
    head = "AutoModelForSentenceEmbedding"
    vectors = True
    takes_texts = False
    shares_texts = True
    usual_length = 256
    graph_outputs = ("sentence_embedding",)
    form = "vector"
    shows = False
    pipeline = "sentence-similarity"
    headline = (
        "The model in this page finds what is nearest in meaning to what you type."
    )
    pair_metrics = ("spearman", "pearson")
    """The metrics of pairs of texts; the others are for queries with passages."""
    metrics = (*pair_metrics, *MEASURES)

    @classmethod
    def read_files(cls, request: DataRequest) -> UnsavedTask | None:
        """Read texts, pairs of texts, or queries with passages: see
        `data.embedding`."""
        from compress.data.embedding import is_embedding, load_embedding

        if request.kind is None and not (
            request.detects and is_embedding(request.source)
        ):
            return None
        return load_embedding(
            request.source,
            text=request.text,
            label=request.label,
            metric=request.metric,
            seed=request.seed,
        )

    @classmethod
    def from_settings(cls, settings: SentenceSettings) -> Task:
        """Return the task of an encoder with these modules, whatever data it was
        trained on."""
        from compress.models.sentence_modules import Dense, Pooling

        read_width = next(
            module.read_width
            for module in settings.modules
            if isinstance(module, Pooling | Dense)
        )
        return cls(
            cls.kind,
            ("text",),
            "similarity",
            (),
            cls.metrics[0],
            width=settings.width(read_width),
            preparation=settings.preparation,
        )

    @classmethod
    def auto_class(cls) -> Any:
        from compress.models.sentence_encoder import AutoModelForSentenceEmbedding

        return AutoModelForSentenceEmbedding

    @classmethod
    def count_outputs(cls, config: Any) -> int:
        """Count the numbers of the vectors."""
        from compress.models.sentence_settings import width_of

        return width_of(config)

    def describe_answer(self) -> str:
        return (
            f"answers with a vector of {self.width} numbers; the vectors of texts with "
            "similar meaning have a high cosine."
        )

    def configure(self, config: Any, max_length: int) -> None:
        """Store the maximum length and the prompts of the texts in the config."""
        from compress.models.sentence_settings import set_settings, settings_of

        settings = replace(
            settings_of(config), max_length=max_length, preparation=self.preparation
        )
        set_settings(config, settings)

    def predict(self, predictor: Any, texts: Sequence[Text]) -> list[Outcome]:
        return [Vector(tuple(each)) for each in predictor.embed(texts).tolist()]

    def answer_columns(self, predictor: Any, texts: Sequence[Text]) -> AnswerColumns:
        return {"prediction": predictor.embed(texts)}

    def answer_schema(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema({"prediction": pa.list_(pa.float32())})

    @classmethod
    def read_graph(
        cls, text: Text, outputs: Mapping[str, Any], labels: Sequence[str]
    ) -> Vector:
        return Vector(tuple(outputs["sentence_embedding"].tolist()))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The two labels that a config has by default: vectors have no named
        outputs."""
        return ("LABEL_0", "LABEL_1")

    @classmethod
    def scored_unit(cls, metric: str) -> str:
        return "pairs" if metric in cls.pair_metrics else "queries"

    def count_examples(self, split: Dataset) -> int:
        """Count the judged pairs of texts, or the queries of a split with passages."""
        return embedding.count_examples(split)

    def choose_examples(self, exam: Evaluator, count: int) -> Array:
        return embedding.subsample(exam.split, count)

    def thin(self, split: Dataset, count: int) -> Dataset:
        """Keep queries together with the texts they are judged with, because texts
        refer to each other by number."""
        return embedding.select(split, embedding.subsample(split, count))

    def select(self, exam: Evaluator, examples: Array) -> tuple[Dataset, Array]:
        return embedding.select(exam.split, examples), examples

    def scores(self, exam: Evaluator, logits: Array, threshold: float | None) -> Scores:
        return embedding.scores(exam.split, logits)

    def agreement(
        self, exam: Evaluator, student: Array, teacher: Array, thresholds: Thresholds
    ) -> float:
        """Measure the mean cosine of the vectors of the same texts."""
        return embedding.similarity(student, teacher)

    def distance(self, exam: Evaluator, student: Array, teacher: Array) -> float:
        """Measure 1 minus the mean cosine."""
        return 1 - embedding.similarity(student, teacher)

    def example_scores(
        self, exam: Evaluator, logits: Array, threshold: float | None
    ) -> Array | None:
        return embedding.example_values(exam.split, logits).get(self.metric)

    def metric_of_examples(
        self, exam: Evaluator, logits: Array
    ) -> tuple[Callable[[Array], float], int]:
        values = embedding.example_values(exam.split, logits)

        def score(drawn: Array) -> float:
            return embedding.mean(values, drawn)[self.metric]

        return score, len(next(iter(values.values())))

    def baselines(self, data: TaskData, split: Dataset) -> dict[str, Scores]:
        """Score words instead of vectors."""
        name = "BM25" if any(split["passage"][:]) else "shared words"
        return {name: embedding.word_scores(split)}

    def majority(self, data: TaskData, split: Dataset) -> Scores:
        """Score the same vector for all texts."""
        return dict.fromkeys(self.metrics, 0.0)

    def lead(
        self, data: TaskData, exam: Evaluator, logits: Array
    ) -> tuple[float, float]:
        """Derive the error from the interval: texts are compared with each other, so
        none can be left out."""
        low, high = exam.interval(logits)
        return exam.scores(logits)[self.metric], (high - low) / (2 * 1.96)
