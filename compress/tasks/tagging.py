"""Give every word of a sentence a tag, and so find entities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.arrays import Longs
from compress.data.answers import Mark, Marked, Outcome, check_finite
from compress.data.conll import OUTSIDE, entities, standard_labels
from compress.data.task import Examples, Task, TaskData, Thresholds, UnsavedTask
from compress.data.windows import Window, find_words
from compress.evaluation import metrics
from compress.evaluation.metrics import Scores
from compress.records.class_scores import ClassScore

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

    from compress.arrays import Array
    from compress.data.encoder import TextEncoder
    from compress.data.load import AnnotatedSplits, DataRequest
    from compress.data.tables import Table
    from compress.evaluation.evaluator import Evaluator
    from compress.models.folder import ModelFolder


class Tagging(Task):
    """Give every word one of `labels`, IOB2 tags: the highest logit at its first token.

    f1, precision and recall of entities, accuracy of words
    """

    kind = "tagging"
    metrics = ("f1", "precision", "recall", "accuracy")
    tokenwise = True
    class_word = "type of entity"
    has_labels = True
    shares = ()  # accuracy is of words, which are not independent
    head = "AutoModelForTokenClassification"
    word_labels = True
    label_column = "tags"
    graph_spans = ("offsets", "words")
    form = "words"
    pipeline = "token-classification"
    example = '"a sentence"'
    samples = (("Ada Lovelace met Charles Babbage in London.",),)
    headline = "The model in this page labels the words of what you type."

    @classmethod
    def read_files(cls, request: DataRequest) -> UnsavedTask | None:
        """Read files with a word and its tag in each line."""
        from compress.data.conll import is_conll, read
        from compress.data.load import read_annotated_files

        annotated = read_annotated_files(request, is_conll, read)
        return None if annotated is None else cls._load(annotated, request)

    @classmethod
    def read_tables(cls, request: DataRequest) -> UnsavedTask | None:
        """Read tables with a list of words and a list of tags in each row."""
        from compress.data import conll
        from compress.data.load import read_annotated_tables, refuse_tables

        train = request.opened.train
        columns = conll.table_columns(train, request.text, request.label)
        if not columns:
            refuse_tables(
                request,
                "files with a word and its tag in each line, or tables with lists of "
                "words and of tags, such as tokens and ner_tags (or as --text and "
                "--label name them)",
            )
            return None

        def read(table: Table) -> Examples:
            return conll.read_table(table, columns)

        return cls._load(read_annotated_tables(request.opened, read), request)

    @classmethod
    def _load(cls, annotated: AnnotatedSplits, request: DataRequest) -> UnsavedTask:
        from compress.data import conll, load

        metric = cls.choose_metric(request.metric)
        tables, notes = load.collect(annotated, "sentences", request.seed)
        given = annotated.splits["train"]  # with what is held out of it
        assert given is not None, "collect has refused it"
        names = conll.labels(given.table["tags"].to_pylist())
        places = annotated.places
        tables = {
            role: load.encode_tags(table, names, places.get(role, places["train"]))
            for role, table in tables.items()
        }
        task = cls(cls.kind, ("words",), "tags", names, metric)
        return load.unsaved(annotated.name, task, tables, notes)

    def count_classes(self, split: Dataset) -> Longs:
        tags = split.data.table[self.label_column].combine_chunks().flatten()
        return np.bincount(tags.to_numpy(), minlength=len(self.labels))

    def describe_answer(self) -> str:
        return "gives each word one of these tags, at the first token of the word:"

    @classmethod
    def from_checkpoint(
        cls, source: ModelFolder, problem: str | None, text: tuple[str, ...]
    ) -> Task:
        labels = standard_labels(source.labels(), str(source.path))
        return cls(cls.kind, ("words",), "tags", labels, cls.metrics[0])

    def predict(self, predictor: Any, texts: Sequence[str]) -> list[Outcome]:
        """Find the entities of each text, split by `windows.find_words`."""
        encoder = predictor.encoder
        words = list(map(find_words, texts))
        split = [
            [text[start:end] for start, end in spans]
            for text, spans in zip(texts, words, strict=True)
        ]
        read = encoder.words(split, predictor.max_length)
        rows = (encoder.row(window.row) for each in read for window in each)
        values_TV = check_finite(predictor.logits(rows))
        at = 0
        answers = list[Outcome]()
        for text, spans, windows in zip(texts, words, read, strict=True):
            tags = [OUTSIDE] * len(spans)
            shares = np.ones(len(spans))
            for window in windows:
                end = at + len(window.word)
                for word, row_V in zip(window.word, values_TV[at:end], strict=True):
                    if word >= 0:
                        best = int(row_V.argmax())
                        tags[word] = self.labels[best]
                        shares[word] = 1 / np.exp(row_V - row_V[best]).sum()
                at = end
            answers.append(find_entities(text, spans, tags, shares))
        return answers

    def answer_schema(self) -> pa.Schema:
        import pyarrow as pa

        mark = {
            "text": pa.string(),
            "label": pa.string(),
            "score": pa.float64(),
            "start": pa.int64(),
            "end": pa.int64(),
        }
        return pa.schema({"prediction": pa.list_(pa.struct(mark))})

    @classmethod
    def graph_row(
        cls, encoder: TextEncoder, frame: Any, text: str
    ) -> dict[str, list[Any]]:
        spans = find_words(text)
        words = [text[start:end] for start, end in spans]
        (found,) = encoder.words([words], frame.max_length)
        if not found:
            nothing = encoder.row(Window([frame.padding], [0], []))
            return dict(nothing) | {name: [[0, 0]] for name in cls.graph_spans}
        window = found[-1 if frame.side == "left" else 0].row
        spaced = [f" {word}" for word in words]
        made = encoder.backend.encode(
            spaced, is_pretokenized=True, add_special_tokens=False
        )
        before = None
        if len(made.ids) > frame.room and frame.side == "left":
            before = made.word_ids[-frame.room - 1]
        made.truncate(frame.room, direction=frame.side)
        row: dict[str, list[Any]] = dict(encoder.row(window))
        row |= {name: [[0, 0] for _ in window.ids] for name in cls.graph_spans}
        # none is None: there are no special tokens
        numbers = [number for number in made.word_ids if number is not None]
        places = zip(window.text, numbers, made.offsets, strict=True)
        for at, word, (start, end) in places:
            begin = spans[word][0]
            # the space before a word is not in the text
            row["offsets"][at] = [begin + start - 1, begin + end - 1]
            row["words"][at] = [0, 0] if word == before else list(spans[word])
            before = word
        return row

    @classmethod
    def read_graph(
        cls, text: str, outputs: Mapping[str, Any], labels: Sequence[str]
    ) -> Marked:
        """Find the entities among the words that a `text` file has labelled; words
        without a token are outside."""
        spans = find_words(text)
        tags = [OUTSIDE] * len(spans)
        shares = np.ones(len(spans))
        number_at = {start: number for number, (start, _) in enumerate(spans)}
        words = zip(outputs["label"], outputs["score"], outputs["words"], strict=True)
        for label, score, (start, _) in words:
            if label:
                tags[number_at[start]] = label
                shares[number_at[start]] = score
        return find_entities(text, spans, tags, shares)

    @classmethod
    def standard_labels(cls, names: Sequence[str], place: str) -> tuple[str, ...]:
        return standard_labels(names, place)

    def scores(self, exam: Evaluator, logits: Array, threshold: float | None) -> Scores:
        return metrics.entity_scores(exam.tags(logits), exam.true_tags)

    def by_class(self, exam: Evaluator, logits: Array) -> tuple[ClassScore, ...]:
        """Score each type of entity."""
        return metrics.scores_by_label(exam.tags(logits), exam.true_tags)

    def list_answers(
        self, exam: Evaluator, logits: Array, threshold: float | None
    ) -> list[list[str]]:
        return exam.tags(logits)

    def decide(self, exam: Evaluator, logits: Array, threshold: float | None) -> Array:
        """Choose a tag for each word."""
        return exam.tag_ids(logits)

    def count_changed(
        self, exam: Evaluator, student: Array, teacher: Array, thresholds: Thresholds
    ) -> int:
        """Count the sentences in which any word has another tag."""
        pairs = zip(exam.tags(student), exam.tags(teacher), strict=True)
        return sum(one != other for one, other in pairs)

    def distance(self, exam: Evaluator, student: Array, teacher: Array) -> float:
        """Measure the mean KL divergence from the teacher's probabilities to the
        student's, over tokens, in nats."""
        return float(metrics.divergence(student, teacher).mean())

    def metric_of_examples(
        self, exam: Evaluator, logits: Array
    ) -> tuple[Callable[[Array], float], int]:
        counts_N5 = metrics.count_entities(exam.tags(logits), exam.true_tags)

        def score(drawn: Array) -> float:
            return metrics.score_counts(counts_N5[drawn])[self.metric]

        return score, len(exam)

    def baselines(self, data: TaskData, split: Dataset) -> dict[str, Scores]:
        from compress.evaluation.baselines import tag_of_each_word

        return {
            "majority": self.majority(data, split),
            "tag of each word": tag_of_each_word(data, split),
        }

    def majority(self, data: TaskData, split: Dataset) -> Scores:
        """Score giving every word the most frequent tag."""
        from compress.evaluation.baselines import tag_scores

        counts = Counter(tag for tags in data.train["tags"] for tag in tags)
        commonest = counts.most_common(1)[0][0]
        predicted = [[commonest] * len(tags) for tags in split["tags"][:]]
        return tag_scores(data, predicted, split)


def find_entities(
    text: str, words: Sequence[tuple[int, int]], tags: Sequence[str], shares: Array
) -> Marked:
    """Find the entities of a text whose words (first character, end) have these tags
    and probabilities."""
    marks = []
    for label, first, last in entities(tags):
        start = words[first][0]
        end = words[last - 1][1]
        share = float(shares[first:last].mean())
        marks.append(Mark(text[start:end], label, share, start, end))
    return Marked(tuple(marks))
