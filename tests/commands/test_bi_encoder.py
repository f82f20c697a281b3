"""Vectors learn which passage belongs to a query, from relevance or from a cross-encoder's scores."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from rich.console import Console

from compress.commands.distill import distill
from compress.config.choices import CandidateRecipes
from compress.config.options import DataOptions, LengthOptions, RunOptions
from compress.config.recipe import Recipe
from compress.data import load_task
from compress.data.query_groups import MOST_IRRELEVANT, group_rows
from compress.data.text_preparation import TextPreparation
from compress.data.tokenize import encode
from compress.errors import DataError, TeacherError
from compress.exporters.artifact import Bundle
from compress.jobs.loading import TaskLoader
from compress.jobs.request import DistillRequest
from compress.models.folder import identify
from compress.teachers.opening import choose_recipe
from compress.training.objective import answers
from compress.training.reranker import load_reranker, score_passages
from compress.training.stage import batches
from tests import marked, tiny
from tests.commands.test_embedding import save_encoder

TABLE = [
    ("who acts", "the actor", 1, 4.0),
    ("who acts", "a dull film", 0, -1.0),
    ("who acts", "so sad", 0, -2.0),
    ("how is it", "so sad", 1, 3.0),
    ("how is it", "the actor", 0, 0.5),
    ("how is it", "it is fun", 2, 5.0),
    ("nobody knows", "so sad", 0, -3.0),
]


def write(path: Path, *, columns: tuple[str, ...] = ("query", "passage", "relevance", "prediction")) -> Path:
    chosen = [("query", "passage", "relevance", "prediction").index(name) for name in columns]
    rows = [columns, *([str(row[at]) for at in chosen] for row in TABLE)]
    path.write_text("\n".join("\t".join(row) for row in rows) + "\n")
    return path


def grouped(path: Path) -> list[tuple[str, str, float, float | None]]:
    """The groups of a table's training rows: query, text, relevance, score."""
    dev = path.with_name("dev.tsv")
    dev.write_text("query\tpassage\trelevance\nother\tthe actor\t1\nanother\tso sad\t1\n")
    split = load_task(f"train={path},dev={dev}", kind="embedding").train
    rows = group_rows(split, encode(split, tiny.tokenizer(), 16))
    assert rows["index"][:] == list(range(len(rows)))
    texts, scores = split["text"][:], rows["scores"][:] if "scores" in rows.column_names else [None] * len(rows)
    asked, found = ([texts[number] for number in rows[name][:]] for name in ("asker", "text"))
    assert rows["input_ids"][:] == [tiny.tokenizer()(text)["input_ids"] for text in found]
    return list(zip(asked, found, rows["relevance"][:], scores, strict=True))


def test_groups_have_a_query_a_relevant_passage_and_irrelevant_ones(tmp_path: Path) -> None:
    assert grouped(write(tmp_path / "train.tsv")) == [
        ("who acts", "who acts", 0, 0),
        *(("who acts", text, relevance, score) for _, text, relevance, score in TABLE[:3]),
        ("how is it", "how is it", 0, 0),
        ("how is it", "so sad", 1, 3),
        ("how is it", "the actor", 0, 0.5),
        ("how is it", "how is it", 0, 0),
        ("how is it", "it is fun", 2, 5),
    ]
    without = grouped(write(tmp_path / "train.tsv", columns=("query", "passage", "relevance")))
    assert [(*row[:3], None) for row in grouped(write(tmp_path / "train.tsv"))] == without
    best = grouped(write(tmp_path / "train.tsv", columns=("query", "passage", "prediction")))
    assert [(query, text) for query, text, relevance, _ in best if relevance] == [
        ("who acts", "the actor"), ("how is it", "it is fun"), ("nobody knows", "so sad"),
    ]  # fmt: skip


def test_a_group_has_a_limited_number_of_irrelevant_passages(tmp_path: Path) -> None:
    lines = ["query\tpassage\trelevance", "who acts\tthe actor\t1", *(f"who acts\tdull {n}\t0" for n in range(20))]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "dev.tsv").write_text("query\tpassage\nhow is it\tfun\nso\tsad\n")
    split = load_task(str(tmp_path), kind="embedding").train
    assert len(group_rows(split, encode(split, tiny.tokenizer(), 16))) == 2 + MOST_IRRELEVANT


def test_a_small_batch_has_the_query_and_its_relevant_passage(tmp_path: Path) -> None:
    lines = ["query\tpassage\trelevance", "who acts\tthe actor\t1", *(f"who acts\tdull {n}\t0" for n in range(20))]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "dev.tsv").write_text("query\tpassage\nhow is it\tfun\nso\tsad\n")
    split = load_task(str(tmp_path), kind="embedding").train
    rows = group_rows(split, encode(split, tiny.tokenizer(), 16))
    (batch,) = batches(Recipe.load("dpr").stages[0].model_copy(update={"batch": 4}), rows, 0)
    assert len(batch) == 4
    assert set(batch) >= {0, 1}


@pytest.mark.parametrize("name", ["texts.txt", "pairs.tsv"])
def test_texts_without_queries_are_refused(name: str, tmp_path: Path) -> None:
    """A similarity of two texts is no relevance."""
    rows = [f"a film {n}" if name == "texts.txt" else f"a film {n}\tthe plot {n}\t{n % 5}" for n in range(200)]
    (tmp_path / name).write_text("\n".join(["sentence1\tsentence2\tscore"] * (name == "pairs.tsv") + rows) + "\n")
    split = load_task(str(tmp_path / name), kind="embedding").train
    with pytest.raises(DataError, match="queries with relevant passages, but the training split has none"):
        group_rows(split, encode(split, tiny.tokenizer(), 16))


def test_answers_leave_out_what_may_be_relevant_too() -> None:
    """Two groups of one query, and a passage that is in the group of another query as well."""
    query, asker = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]), torch.tensor([0, 0, 0, 0, 0, 5, 5, 5])
    text = torch.tensor([0, 1, 2, 0, 3, 5, 6, 1])
    found = answers(query, text, asker)
    expected = [
        [-1, 1, 1, -1, -1, -1, 0, -1],  # 1 is its own passage, and so is its copy
        [-1] * 8,
        [-1] * 8,
        [-1, -1, -1, -1, 1, -1, 0, -1],  # 1 and 2 belong to the other group of this query
        [-1] * 8,
        [-1, -1, 0, -1, 0, -1, 1, 1],  # 1 is judged here
        [-1] * 8,
        [-1] * 8,
    ]
    assert found.tolist() == expected


def test_the_text_of_a_query_is_no_wrong_answer_to_it(tmp_path: Path) -> None:
    """Paraphrases: text 0 asks for 1, and 1 for 0; 2 asks for 3."""
    pairs = [("who acts", "the actor"), ("the actor", "who acts"), ("how is it", "it is fun")]
    (tmp_path / "train.tsv").write_text("\n".join(map("\t".join, [("query", "positive"), *pairs])) + "\n")
    (tmp_path / "dev.tsv").write_text("query\tpassage\nso\tsad\nsad\tso\n")
    split = load_task(str(tmp_path), kind="embedding").train
    preparation = TextPreparation({"query": "good ", "document": "bad "})
    rows = group_rows(split, encode(split, tiny.tokenizer(), 16, preparation=preparation))
    texts = [split["text"][number] for number in rows["text"]]
    assert texts == [text for pair in pairs for text in pair]
    prompts = ["good ", "bad "] * len(pairs)  # of queries and of passages
    prompted = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    assert rows["input_ids"][:] == tiny.tokenizer()(prompted)["input_ids"]
    found = answers(*(torch.tensor(rows[name][:]) for name in ("query", "text", "asker")))
    assert found[::2].tolist() == [[-1, 1, -1, -1, -1, 0], [-1, -1, -1, 1, -1, 0], [-1, 0, -1, 0, -1, 1]]
    (batch,) = batches(Recipe.load("dpr").stages[0].model_copy(update={"batch": 6}), rows, 0)
    assert sorted(batch) == list(range(6))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("teacher"))


@pytest.mark.usefixtures("hastened")
def test_vectors_learn_from_relevance(teacher: Path, tmp_path: Path) -> None:
    """The recipe `dpr`: a tiny encoder with random weights learns to find the passages of queries it has not seen."""
    marked.beir(tmp_path / "beir")
    bundle = learn(teacher, tmp_path, data=tmp_path / "beir", recipe="dpr")
    rows = {row.role: row.score for row in bundle.report().rows}
    assert rows["student"]["ndcg@10"] > rows["teacher"]["ndcg@10"] + 0.1


@pytest.mark.usefixtures("hastened")
def test_vectors_learn_from_scores(teacher: Path, tmp_path: Path) -> None:
    """The recipe `margin-mse-vectors`, from the scores of one who knows which passages have the query's word."""
    for split, count in (("train", 40), ("dev", 12), ("test", 12)):
        lines = ["query\tpassage\tprediction"]
        for n in range(count):
            query = f"{marked.ANSWERS[n % 8]} {marked.FILLERS[n % 10]} ?"
            for other in range(6):
                passage = f"{marked.FILLERS[(n + 3 * other) % 10]} {marked.ANSWERS[(n + other) % 8]} {split} {n}"
                lines.append(f"{query}\t{passage}\t{4 if other == 0 else -2 - other / 5}")
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    bundle = learn(teacher, tmp_path, data=tmp_path, recipe="margin-mse-vectors")
    rows = {row.role: row.score for row in bundle.report().rows}
    assert rows["student"]["ndcg@10"] > rows["teacher"]["ndcg@10"] + 0.1
    with pytest.raises(TeacherError, match=r"name a cross-encoder as the teacher"):
        learn(teacher, tmp_path, data=marked.beir(tmp_path / "beir"), recipe="margin-mse-vectors", out="other")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny.checkpoint(tmp_path_factory.mktemp("reranker"), tiny.bert(labels=1)))


def test_auto_takes_the_recipe_for_a_cross_encoder(reranker: Path, teacher: Path, tmp_path: Path) -> None:
    table, data = CandidateRecipes.load("auto"), str(marked.beir(tmp_path / "beir"))
    for name, kind, expected in (
        (reranker, "embedding", "margin-mse-vectors"),
        (teacher, "embedding", "prune-taylor"),
        (reranker, "ranking", "prune-taylor"),
    ):
        request = DistillRequest(
            teacher=str(name), data=data, out=tmp_path / "run", recipe=table, corpus=None, prompt=None,
            columns=DataOptions(kind=kind), length=LengthOptions(), options=RunOptions(), console=Console(quiet=True),
        )  # fmt: skip
        recipe = choose_recipe(table, request, TaskLoader(data, 0))
        assert recipe.name == expected


def test_a_cross_encoder_scores_every_judged_passage(reranker: Path, tmp_path: Path) -> None:
    marked.beir(tmp_path / "beir")
    data, model = load_task(str(tmp_path / "beir"), kind="embedding"), load_reranker(reranker)
    train = score_passages(data, model).train
    texts, judged = train["text"][:], [row for row in train if row["related"]]
    assert len(judged) == len([row for row in data.train if row["related"]])
    for row in judged:
        assert row["relevance"].count(0) == 8 and len(set(row["related"])) == len(row["related"])  # found by BM25
        passages = [texts[n] for n in row["related"]]
        pairs = tiny.tokenizer()([row["text"]] * len(passages), passages, padding=True, return_tensors="pt")
        assert row["scores"] == pytest.approx(model.model(**pairs).logits[:, 0].tolist(), abs=1e-5)
    (tmp_path / "dev.tsv").write_text("query\tpassage\trelevance\nother\tthe actor\t1\nanother\tso sad\t1\n")
    scored = load_task(f"train={write(tmp_path / 'train.tsv')},dev={tmp_path / 'dev.tsv'}", kind="embedding")
    for unfit, message in (
        (replace(data, train=tiny_texts(tmp_path)), "has no queries"),
        (scored, "already has a teacher"),
    ):
        with pytest.raises(TeacherError, match=message):
            score_passages(unfit, model)


def test_a_cross_encoder_scores_no_query_as_its_own_passage(reranker: Path, tmp_path: Path) -> None:
    """BM25 would find it first."""
    pairs = [(f"who acts {n}", f"the actor {n}") for n in range(20)]
    rows = [("query", "positive"), *pairs, *(pair[::-1] for pair in pairs)]
    (tmp_path / "train.tsv").write_text("\n".join(map("\t".join, rows)) + "\n")
    train = score_passages(load_task(str(tmp_path / "train.tsv"), kind="embedding"), load_reranker(reranker)).train
    texts = train["text"][:]
    assert any(train["related"][:])
    for text, related in zip(texts, train["related"][:], strict=True):
        assert text not in [texts[other] for other in related]


def tiny_texts(folder: Path) -> Dataset:
    (folder / "texts.txt").write_text("\n".join(f"a film {n}" for n in range(200)) + "\n")
    return load_task(str(folder / "texts.txt"), kind="embedding").train


@pytest.mark.usefixtures("hastened")
def test_vectors_learn_from_a_cross_encoder(teacher: Path, reranker: Path, tmp_path: Path) -> None:
    """`--teacher` is the cross-encoder; the student begins as another checkpoint, and learns the margins."""
    marked.beir(tmp_path / "beir")
    changes = [f"student.init={teacher}", "student.layers=null", "stages.0.objective.1.weight=5.0"]
    learn(reranker, tmp_path, data=tmp_path / "beir", recipe="margin-mse-vectors", changes=changes)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    margins = [line["margin_mse.vectors"] for line in lines if "margin_mse.vectors" in line]
    assert margins[-1] < 0.5 * margins[0]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["teacher"] == str(reranker)
    assert run["digests"]["teacher"] == identify(reranker) != identify(teacher) == run["digests"]["student"]
    with pytest.raises(TeacherError, match="by --recipe margin-mse-vectors"):
        learn(reranker, tmp_path, data=tmp_path / "beir", recipe="dpr", out="other")


def learn(
    teacher: Path, folder: Path, *, data: Path, recipe: str, out: str = "run", changes: Sequence[str] = ()
) -> Bundle:
    found = Recipe.load(recipe, changes)
    short = {"steps": 120, "lr": 3e-3, "batch": 32, "max_length": 16}
    stages = tuple(stage.model_copy(update=short) for stage in found.stages)
    return distill(
        teacher=teacher, data=str(data), columns=DataOptions(kind="embedding"), out=folder / out,
        options=RunOptions(gate="warn"),
        recipe=found.model_copy(update={"stages": stages}),
    )  # fmt: skip
