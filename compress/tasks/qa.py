"""Answer a question with a span of a context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.arrays import Doubles, Ints
from compress.data.answers import Answer, Outcome, check_finite
from compress.data.constants import MASKED
from compress.data.task import Task, TaskData, UnsavedTask
from compress.data.windows import LONGEST_QUESTION, slice_text
from compress.evaluation import qa
from compress.evaluation.metrics import Scores

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from torch import Tensor

    from compress.arrays import Array
    from compress.data.encoder import TextEncoder
    from compress.data.load import AnnotatedSplits, DataRequest
    from compress.evaluation.evaluator import Evaluator
    from compress.models.folder import ModelFolder


class Qa(Task):
    """Answer with the span whose first and last token have the highest sum of logits,
    or with nothing.

    f1, exact, and more if some questions have no answer: see `evaluation.qa`
    """

    kind = "qa"
    metrics = ("f1", "exact")
    tokenwise = True
    head = "AutoModelForQuestionAnswering"
    takes_texts = False
    graph_outputs = ("start_logits", "end_logits")
    graph_spans = ("offsets",)
    form = "span"
    columns = ("prediction_score", "prediction_start", "prediction_end")
    pipeline = "question-answering"
    example = '"a question", "the text it is about"'
    shell = "'a question' --pair 'the text'"
    samples = (
        (
            "Who wrote the first program?",
            "Charles Babbage designed a machine in London. Ada Lovelace wrote the "
            "first program for it.",
        ),
    )
    headline = "The model in this page finds the answer to a question in a text."
    longest_row = 384  # longer texts take several rows (Devlin et al. 2019, their code)

    @classmethod
    def read_files(cls, request: DataRequest) -> UnsavedTask | None:
        """Read the json of SQuAD."""
        from compress.data.load import read_annotated_files
        from compress.data.squad import is_squad, read

        annotated = read_annotated_files(request, is_squad, read)
        return None if annotated is None else cls._load(annotated, request)

    @classmethod
    def read_tables(cls, request: DataRequest) -> UnsavedTask | None:
        """Read tables with the columns of SQuAD."""
        from compress.data import load, squad

        if request.names_columns or not squad.is_table(request.opened.train):
            columns = ", ".join(squad.COLUMNS)
            load.refuse_tables(
                request, f"the json of SQuAD, or tables with the columns {columns}"
            )
            return None
        annotated = load.read_annotated_tables(request.opened, squad.read_table)
        return cls._load(annotated, request)

    @classmethod
    def _load(cls, annotated: AnnotatedSplits, request: DataRequest) -> UnsavedTask:
        from compress.data import load, squad

        metric = cls.choose_metric(request.metric)
        tables, notes = load.collect(annotated, "texts", request.seed)
        unanswerable = squad.count_unanswerable(tables, notes)
        if unanswerable is None:
            raise load.no_answers(annotated.places["train"])
        text = ("question", "context")
        task = cls(cls.kind, text, "answers", (), metric, unanswerable)
        return load.unsaved(annotated.name, task, tables, notes)

    @property
    def outputs(self) -> int:
        return 2

    def describe(self, threshold: float | None) -> str:
        nothing = ""
        if self.unanswerable:
            nothing = ", or with nothing where the text holds no answer"
            if threshold is not None:
                nothing += (
                    f" (where that scores more than {threshold:.4g} better than the "
                    "best span)"
                )
        return (
            "It reads a question and a text, and answers with a span of the text"
            f"{nothing}."
        )

    @classmethod
    def from_checkpoint(
        cls, source: ModelFolder, problem: str | None, text: tuple[str, ...]
    ) -> Task:
        text = ("question", "context")
        return cls(cls.kind, text, "answers", (), cls.metrics[0])

    def predict(
        self, predictor: Any, texts: Sequence[tuple[str, str]]
    ) -> list[Outcome]:
        """Answer (question, context) pairs."""
        if not texts:
            return []
        encoder = predictor.encoder
        questions, contexts = zip(*texts, strict=True)
        found = encoder.questions(questions, contexts, predictor.max_length)
        rows = [window for each in found for window in each]
        question_R = np.repeat(np.arange(len(found)), [len(each) for each in found])
        lengths_R = np.array([len(window.row.ids) for window in rows])
        where = qa.Windows(
            np.concatenate([window.starts for window in rows]),
            np.concatenate([window.ends for window in rows]),
            lengths_R,
            np.array([window.null for window in rows]),
            question_R,
        )
        values_T2 = check_finite(
            predictor.logits(encoder.row(window.row) for window in rows)
        )
        spans = qa.best_spans(values_T2, where)
        nulls_R = np.cumsum(lengths_R) - lengths_R + where.nulls_R
        possible_T = where.starts_T >= 0
        possible_T[nulls_R] = True
        starts = np.flatnonzero(np.diff(np.repeat(question_R, lengths_R), prepend=-1))
        log_p_T2 = _log_softmax(
            np.where(possible_T[:, None], values_T2, -np.inf), starts
        )
        answers = list[Outcome]()
        for n, text in enumerate(spans.texts(contexts, predictor.threshold)):
            if text:
                first = int(spans.first_Q[n])
                last = int(spans.last_Q[n])
                start = contexts[n].index(text, int(spans.starts_Q[n]))
                score = float(np.exp(log_p_T2[first, 0] + log_p_T2[last, 1]))
                answers.append(Answer(text, score, start, start + len(text)))
            else:
                none = nulls_R[question_R == n]
                score = float(np.exp(log_p_T2[none].sum(1).max()))
                answers.append(Answer("", score, 0, 0))
        return answers

    def answer_schema(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema(
            {
                "prediction": pa.string(),
                "prediction_start": pa.int64(),
                "prediction_end": pa.int64(),
                "prediction_score": pa.float64(),
            }
        )

    @classmethod
    def longest_question(cls, max_length: int) -> int:
        return min(LONGEST_QUESTION, max_length // 2)

    @classmethod
    def graph_row(
        cls, encoder: TextEncoder, frame: Any, text: tuple[str, str]
    ) -> dict[str, list[Any]]:
        question, context = text
        (found,) = encoder.questions([question], [context], frame.max_length)
        window = found[-1 if frame.side == "left" else 0]
        row: dict[str, list[Any]] = dict(encoder.row(window.row))
        row["offsets"] = [
            [max(0, start), max(0, end)]
            for start, end in zip(window.starts, window.ends, strict=True)
        ]
        return row

    @classmethod
    def read_graph(
        cls, text: tuple[str, str], outputs: Mapping[str, Any], labels: Sequence[str]
    ) -> Answer:
        start, end = outputs["answer"].tolist()
        found = slice_text(text[1], start, end)
        answer = found.strip()  # a token may begin with the space before a word
        start += len(found) - len(found.lstrip()) if answer else -start
        return Answer(answer, float(outputs["score"]), start, start + len(answer))

    @property
    def output_names(self) -> tuple[str, ...]:
        return ("start", "end")

    @classmethod
    def spread(cls, values: Tensor, mask_BL: Tensor) -> Tensor:
        """Reshape (B, L, 2) logits to (2 B, L), scores of starting, and of ending, at
        each position, where padding never wins; so that a mean over rows is the mean of
        both, as in Sanh et al. and Devlin et al. Labels (B, 2) become (2 B,)."""
        if values.dim() < 3:
            return values.flatten()
        return values.mT.masked_fill(mask_BL[:, None] == 0, MASKED).flatten(0, 1)

    @classmethod
    def distributions(cls, logits: Tensor, mask_BL: Tensor) -> Tensor:
        return cls.spread(logits, mask_BL)

    def scores(self, exam: Evaluator, logits: Array, threshold: float | None) -> Scores:
        spans = exam.spans(logits)
        contexts = exam.split["context"][:]
        answers = exam.split["answers"][:]
        values = qa.answer_scores(exam.texts_of(spans, threshold), answers, contexts)
        if self.unanswerable:
            always = qa.f1_of_spans(spans, contexts, answers)
            if always is not None:
                values["f1_of_spans"] = always
        return values

    def list_answers(
        self, exam: Evaluator, logits: Array, threshold: float | None
    ) -> list[str]:
        unspaced = map(qa.is_unspaced, exam.split["context"][:])
        texts = exam.texts(logits, threshold=threshold)
        return [
            qa.normalise_answer(text, unspaced=without)
            for text, without in zip(texts, unspaced, strict=True)
        ]

    def decide(self, exam: Evaluator, logits: Array, threshold: float | None) -> Array:
        """Return the answer to each question as an array."""
        return np.array(self.list_answers(exam, logits, threshold))

    def example_scores(
        self, exam: Evaluator, logits: Array, threshold: float | None
    ) -> Array:
        score = {"f1": qa.f1, "exact": qa.exact}[self.metric]
        questions = zip(
            exam.texts(logits, threshold=threshold),
            map(qa.right_answers, exam.split["answers"][:]),
            exam.split["context"][:],
            strict=True,
        )
        return np.array(
            [score(text, right, context) for text, right, context in questions]
        )

    def choose_threshold(self, exam: Evaluator, logits: Array) -> float:
        return exam.best_threshold(exam.spans(logits))

    def baselines(self, data: TaskData, split: Dataset) -> dict[str, Scores]:
        from compress.evaluation.baselines import nearest_sentence

        return {
            "majority": self.majority(data, split),
            "nearest sentence": nearest_sentence(split),
        }

    def majority(self, data: TaskData, split: Dataset) -> Scores:
        """Score answering no question."""
        return qa.answer_scores(
            [""] * len(split), split["answers"][:], split["context"][:]
        )


def _log_softmax(values_T2: Doubles, starts: Ints) -> Doubles:
    """Compute log softmax of each column, over the segments of tokens that begin at
    `starts`."""
    sizes = np.diff(starts, append=len(values_T2))
    shifted = values_T2 - np.repeat(
        np.maximum.reduceat(values_T2, starts), sizes, axis=0
    )
    sums = np.log(np.add.reduceat(np.exp(shifted), starts))
    return np.asarray(shifted - np.repeat(sums, sizes, axis=0))
