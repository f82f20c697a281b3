"""Sentence vectors from teacher to bundle: the same numbers everywhere, scored as pairs and as searches."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModel

import compress
from compress.config.options import RunOptions
from compress.config.stages import StudentSpec
from compress.data.load import load_task
from compress.data.task import Task
from compress.data.text_preparation import TextPreparation
from compress.data.tokenize import encode
from compress.data.vector_index import StoredForm, find_nearest, pack
from compress.errors import BundleError, CompressError, DataError, ExportError, TeacherError
from compress.evaluation import embedding as scoring
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.predictor import NearestTexts
from compress.exporters.row_files import open_index, predict_file
from compress.exporters.tokenizer.text_model import run_text, text_file
from compress.models import student as students
from compress.models.loader import load_model
from compress.models.sentence_encoder import AutoModelForSentenceEmbedding, SentenceEncoder
from compress.models.sentence_folder import SentenceFolder
from compress.models.sentence_modules import Dense, Normalize, Pooling
from compress.models.sentence_settings import SentenceSettings, set_settings, settings_of, width_of
from compress.models.teacher import load as load_teacher
from compress.prompting.vectors import open_source
from compress.reporting.tables import score_tables
from compress.training.teacher_vectors import with_teacher
from tests import command, tiny, unshipped
from tests.nas.shelved import SPACE, weighing

TASK = Task("embedding", ("text",), "similarity", (), "spearman")
RECIPE = """
paper: {title: t, authors: a, year: 2025, url: "https://example.org"}
about: a test
choose: never
needs: texts
cost: seconds
student: {layers: 1, hidden: 16, heads: 2, ffn: 32, init: teacher}
stages:
  - distill: vectors
    epochs: 1
    lr: 1.0e-3
    batch: 8
    max_length: 16
    objective:
      - {loss: leaf.l2, only: embedding}
"""


MEAN = SentenceSettings.pooled(32, normalise=True)


def encoder(settings: SentenceSettings = MEAN, *, family: str = "bert", **sizes: int) -> SentenceEncoder:
    config = tiny.config(family, **sizes)
    set_settings(config, settings)
    torch.manual_seed(0)
    return AutoModelForSentenceEmbedding.from_config(config).eval()


def save_encoder(folder: Path) -> Path:
    encoder(layers=2).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def vectors(model: SentenceEncoder, texts: list[str]) -> torch.Tensor:
    rows = tiny.tokenizer()(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**rows).sentence_embedding
    assert found is not None
    return found


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of the tiny vocabulary, and pairs of them with how many words they share."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = [word for word in tiny.WORDS if word.isalpha()]
    drawn = sorted({" ".join(rng.choice(words, 5, replace=False)) for _ in range(120)})
    (folder / "train.txt").write_text("\n".join(drawn[:60]) + "\n")
    pairs = [(drawn[n], drawn[n + 30]) for n in range(60, 90)]
    rows = [f"{one}\t{other}\t{len(set(one.split()) & set(other.split()))}" for one, other in pairs]
    for name in ("validation", "test"):
        (folder / f"{name}.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows]) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def bundle(teacher: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A student narrower than its teacher, in its space."""
    out = tmp_path_factory.mktemp("run") / "first"
    with pytest.MonkeyPatch.context() as patch:
        unshipped.hasten(patch)
        return compress.distill(teacher=teacher, data=data, recipe=data / "recipe.yaml", out=out)


@pytest.mark.parametrize(
    "settings",
    [
        MEAN,
        SentenceSettings((Pooling(("cls",), 32), Dense(32, 20, bias=False, activation="Identity"))),
        SentenceSettings((Pooling(("max",), 32), Dense(32, 48), Normalize())),
    ],
)
def test_encoders_load_in_sentence_transformers(settings: SentenceSettings, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model, texts = encoder(settings), ["a good film", "so sad , and so slow !"]
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    again = load_model(tmp_path, AutoModelForSentenceEmbedding).model
    assert torch.equal(vectors(model, texts), vectors(again, texts))
    theirs = library.SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    np.testing.assert_allclose(theirs, vectors(model, texts), atol=1e-5)
    assert vectors(model, texts).shape[1] == width_of(again.config) == settings.width(32)


@pytest.mark.parametrize("family", ["distilbert", "electra", "modernbert", "static-embedding"])
def test_any_encoder_pools(family: str) -> None:
    if family == "static-embedding":
        from compress.models.static import StaticConfig, StaticModel

        words = StaticModel(StaticConfig(vocab_size=60, hidden_size=8)).eval()
        made = tiny.with_settings(words, SentenceSettings.pooled(8, normalise=True))
    else:
        made = tiny.with_settings(tiny.model(family, head=AutoModel).eval(), MEAN)
    found = vectors(made, ["a good film", "good"])
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(found[1:], vectors(made, ["good"]))  # padding is nothing


def test_a_wrong_linear_map_is_refused(tmp_path: Path) -> None:
    encoder(SentenceSettings((Pooling(("mean",), 32), Dense(32, 8)))).save_pretrained(tmp_path)
    config = tmp_path / "2_Dense/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"out_features": 9}))
    with pytest.raises(
        TeacherError, match=r"tensor 'linear.bias' is \(8,\); its config.json expects \(9,\): download both"
    ):
        load_model(tmp_path, AutoModelForSentenceEmbedding)
    (tmp_path / "2_Dense/model.safetensors").unlink()
    with pytest.raises(TeacherError, match=r"2_Dense: has no model\.safetensors: the weights are missing"):
        load_model(tmp_path, AutoModelForSentenceEmbedding)


def test_a_cross_encoder_is_no_teacher_of_vectors(tmp_path: Path) -> None:
    tiny.bert(labels=1).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(TeacherError, match="returns scores, as a classifier or a cross-encoder does"):
        load_teacher("it", tmp_path, TASK)


def test_a_sentence_encoder_is_a_cross_encoder_only_after_training(teacher: Path) -> None:
    loaded = load_teacher("it", teacher, Task("ranking", ("query", "passage"), "relevance", (), "ndcg@10"))
    assert (loaded.trained, loaded.model.num_labels) == (False, 1)


def test_students_start_in_the_teachers_space() -> None:
    taught = encoder(layers=2)
    spec = StudentSpec(layers=2, hidden=16, heads=2, ffn=64, init="teacher")
    student = students.build(spec, taught, kind="embedding")
    assert isinstance(student, SentenceEncoder)
    assert student.projection is not None
    assert student.projection.weight.shape == (32, 16)
    kept = student.projection.weight.nonzero()[:, 0]
    assert torch.equal(student.projection.weight[kept], torch.eye(16))
    whole = students.build(StudentSpec(layers=2, init="teacher"), taught, kind="embedding")
    texts = ["a good film"]
    assert settings_of(whole.config) == settings_of(taught.config)
    torch.testing.assert_close(vectors(whole.eval(), texts), vectors(taught, texts))  # type: ignore[arg-type]


def split(related: list[list[int]], relevance: list[list[float]], passages: list[int]) -> Dataset:
    count = len(related)
    return Dataset.from_dict(
        {"text": [f"text {n}" for n in range(count)], "related": related, "relevance": relevance,
         "passage": [n in passages for n in range(count)]}
    )  # fmt: skip


def test_search_scores() -> None:
    angles = np.array([0.0, 0.1, 0.5, 1.0])  # text 0 asks; 1 is nearest, 2 is right
    found = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    some = split([[2], [], [], []], [[1.0], [], [], []], [0, 1, 2, 3])
    scores = scoring.scores(some, 5 * found)
    assert scores["mrr@10"] == 0.5
    assert scores["ndcg@10"] == pytest.approx(1 / np.log2(3))
    assert scores["recall@10"] == 1.0
    nearer = found.copy()
    nearer[0] = found[2]
    assert scoring.scores(some, found, queries_NE=nearer)["mrr@10"] == 1.0  # the index stays, another asks
    texts = {"text": ["text 0", "text 0", "text 2", "text 3"]}  # 1 is the passage of the same text
    assert scoring.scores(Dataset.from_dict(some.to_dict() | texts), found)["mrr@10"] == 1.0


def test_pair_scores() -> None:
    some = split([[1], [2], [3], [0]], [[3.0], [2.0], [1.0], [0.0]], [])
    angles = np.array([0.0, 0.1, 0.4, 1.2])
    found = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    cosines = np.cos([0.1, 0.3, 0.8, 1.2])
    scores = scoring.scores(some, found)
    assert scores["spearman"] == pytest.approx(1.0)
    assert scores["pearson"] == pytest.approx(np.corrcoef(cosines, [3, 2, 1, 0])[0, 1], abs=1e-6)
    assert scoring.scores(some, np.ones((4, 2)))["spearman"] == 0.0


def test_scores_of_smaller_vectors() -> None:
    """Texts 0 to 49 ask for the texts 50 to 99, which are near them."""
    rng = np.random.default_rng(0)
    found = rng.normal(size=(50, 16))
    found = np.concatenate([found, found + rng.normal(size=found.shape)])
    some = split([[n + 50] for n in range(50)] + [[]] * 50, [[1.0]] * 50 + [[]] * 50, list(range(50, 100)))
    forms = {form.name: form for form in scoring.score_forms(some, found, "mrr@10")}
    bytes_of = {"float32": 64, "int8": 16, "binary": 2}
    assert {name: form.bytes for name, form in forms.items()} == bytes_of | {
        f"first {first} numbers": 4 * first for first in (8, 4, 2)
    }
    exact = scoring.scores(some, found)["mrr@10"]
    assert forms["float32"].score == exact
    assert forms["int8"].score == pytest.approx(exact, abs=0.02)
    assert forms["first 4 numbers"].score == scoring.scores(some, found[:, :4])["mrr@10"] < exact
    signs = scoring.scores(some, np.sign(found), queries_NE=found)["mrr@10"]
    assert forms["binary"].score == signs < exact


def test_subsets_keep_judgements() -> None:
    some = split([[3], [], [5], [], [], []], [[1.0], [], [2.0], [], [], []], [3, 4, 5])
    kept = scoring.select(some, np.array([0, 3, 4]))
    assert kept["related"][:] == [[1], [], []]
    assert kept["passage"][:] == [False, True, True]
    chosen = scoring.subsample(some, 4)
    assert {0, 3} <= set(chosen.tolist())
    assert len(chosen) == 4
    assert scoring.subsample(some, 100).tolist() == list(range(6))


def test_word_baseline() -> None:
    some = split([[2], [], [], []], [[1.0], [], [], []], [1, 2, 3]).to_dict()
    some["text"] = ["who wrote the plot", "a cold day", "she wrote the plot", "a day"]
    assert scoring.word_scores(Dataset.from_dict(some))["ndcg@10"] == 1.0
    both = split([[1], [0], [3], [2]], [[1.0], [1.0], [1.0], [1.0]], [0, 1, 2, 3]).to_dict()
    both["text"] = ["who wrote it", "who wrote this", "a cold day", "one cold day"]
    assert scoring.word_scores(Dataset.from_dict(both))["mrr@10"] == 1.0, "a text does not find itself"
    rows = split([[3], [2], [], []], [[1.0], [1.0], [], []], [2, 3]).to_dict()
    rows["text"] = ["who wrote it", "who wrote this"] * 2
    assert scoring.word_scores(Dataset.from_dict(rows))["mrr@10"] == 1.0, "nor its other row"


def test_examples_are_pairs_or_queries() -> None:
    """Not the texts, of which every one is a row."""
    pairs = split([[1, 2], [2], []], [[1.0, 0.5], [0.0], []], [])
    queries = split([[2], [], [], []], [[1.0], [], [], []], [1, 2, 3])
    assert [len(Evaluator(TASK, each, each)) for each in (pairs, queries)] == [3, 1]


def test_a_distilled_student(bundle: Bundle, data: Path) -> None:
    assert (bundle.task.kind, bundle.task.width, bundle.task.metric) == ("embedding", 32, "spearman")
    report = bundle.report()
    assert [row.role for row in report.rows] == ["baseline", "teacher", "student", "student"]
    assert all("spearman" in row.score for row in report.rows)
    assert (report.split_rows, report.unit) == (30, "pairs"), "of 60 texts"
    assert len([each for each in report.notes if each.startswith("Vectors of student int8")]) == 1
    assert [form.bytes for form in report.vectors] == [128, 32, 4, 64, 32, 16]
    assert report.vectors[0].score == pytest.approx(report.rows[-1].score["spearman"])
    (proof,) = report.certificates
    assert proof.rows == 30
    assert proof.metric == "spearman"
    card = (bundle.path / "README.md").read_text()
    assert "sentence-similarity" in card
    assert f"| binary | 4 | {report.vectors[2].score:.4f} |" in card
    tables = score_tables(report)
    assert [table.title for table in tables] == ["Other scores", "Smaller vectors"]
    assert [row.name for row in tables[1].rows][:3] == ["float32", "int8", "binary"]


def test_vectors_are_the_same_everywhere(bundle: Bundle) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    texts = ["a good film", "so sad", "good"]
    exact = np.array([each.numbers for each in bundle.predict(texts, precision="fp32")])  # type: ignore[union-attr]
    assert exact.shape == (3, 32)
    np.testing.assert_allclose(bundle.embed(texts, precision="fp32"), exact, atol=1e-6)
    np.testing.assert_allclose(library.SentenceTransformer(str(bundle.path)).encode(texts), exact, atol=1e-5)
    torched = load_model(bundle.path, AutoModelForSentenceEmbedding).model
    np.testing.assert_allclose(vectors(torched, texts), exact, atol=1e-5)
    assert load_file(bundle.path / "2_Dense/model.safetensors")["linear.weight"].shape == (32, 16)


def test_predict_against_a_file(bundle: Bundle, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("a good film\nso sad\nthe plot\n")
    result = command.run("predict", str(bundle.path), "so sad", "--against", str(lines), "--top", "2")
    query, nearest, second = result.out.splitlines()
    assert (query, nearest) == ("so sad", "   1.0000  line 2  so sad")
    assert second.split()[1:3] in (["line", "1"], ["line", "3"])
    result = command.run("predict", str(bundle.path), "so sad", "--against", str(lines), "--json")
    (answer,) = json.loads(result.out)["answers"]
    assert (answer["texts"][0][0], answer["ids"][0], len(answer["ids"])) == ("so sad", "line 2", 3)
    result = command.run("predict", str(bundle.path), "so sad", "--json")
    assert len(json.loads(result.out)["answers"][0]["numbers"]) == 32
    lines.write_text("\nthe plot\n\n")
    result = command.run("predict", str(bundle.path), "so sad", "--against", str(lines), "--top", "2")
    assert result.out.splitlines()[1].split()[1:] == ["line", "2", "the", "plot"]
    lines.write_text(" \n")
    result = command.run("predict", str(bundle.path), "so sad", "--against", str(lines))
    assert (result.code, "there are no texts to search" in result.err) == (2, True)
    result = command.run("predict", str(bundle.path), "so sad", "--pair", "the plot")
    assert (result.code, "expected one text" in result.err) == (2, True), "it is no cross-encoder"
    result = command.run("predict", str(bundle.path), "so sad", "--top", "2")
    assert (result.code, "give the file to search with --against" in result.err) == (2, True)
    other = tiny.bundle(tmp_path / "labels")
    with pytest.raises(BundleError, match="expected one for embedding"):
        NearestTexts.from_texts(other.open(), ["a"])


def test_predict_writes_vectors(bundle: Bundle, data: Path, tmp_path: Path) -> None:
    """Which teaches another student, and is what an index takes."""
    lines = (data / "train.txt").read_text().splitlines()
    made = tmp_path / "train.npy"
    words = ["predict", str(bundle.path), "--input", str(data / "train.txt"), "--output", str(made)]
    command.run(*words)
    np.testing.assert_allclose(np.load(made), bundle.embed(lines), atol=1e-6)
    (tmp_path / "train.txt").write_text("\n".join(lines))
    np.testing.assert_allclose(open_source(str(made)).vectors(lines[5:7]), np.load(made)[5:7], atol=1e-3)
    result = command.run(*words, "--on-error", "skip")
    assert result.code == 2
    assert "cannot hold rows without a vector" in result.err
    other = tiny.bundle(tmp_path / "labels")
    with pytest.raises(DataError, match="holds vectors, which this model does not predict"):
        predict_file(other.open(), data / "train.txt", tmp_path / "other.npy")
    assert not (tmp_path / "other.npy").exists()


@pytest.mark.parametrize("form", ["int8", "binary"])
def test_predict_packs_vectors_and_searches_them(form: StoredForm, bundle: Bundle, data: Path, tmp_path: Path) -> None:
    lines = (data / "train.txt").read_text().splitlines()
    (tmp_path / "train.txt").write_text("\n".join(lines))
    made = tmp_path / "train.npy"
    words = ["predict", str(bundle.path), "--input", str(tmp_path / "train.txt"), "--vectors", form, "--output"]
    assert command.run(*words, str(made)).code == 0
    np.testing.assert_array_equal(np.load(made), pack(bundle.embed(lines), form))
    result = command.run("predict", str(bundle.path), lines[7], "--against", str(made), "--top", "2", "--json")
    found = json.loads(result.out)["answers"][0]["texts"]
    nearest, cosines = find_nearest(bundle.embed([lines[7]]), np.load(made), 2)
    assert [text for text, _ in found] == [lines[n] for n in nearest[0]]
    assert [cosine for _, cosine in found] == pytest.approx(cosines[0].tolist())
    result = command.run(*words, str(tmp_path / "train.jsonl"))
    assert (result.code, "packs the vectors of an .npy file" in result.err) == (2, True)
    result = command.run("predict", str(bundle.path), "so sad", "--vectors", form)
    assert (result.code, "give an .npy file with --output" in result.err) == (2, True)


def test_the_rows_of_a_table_are_searched(bundle: Bundle, tmp_path: Path) -> None:
    """Once BEIR's corpus.jsonl was searched line by line, as JSON."""
    rows = [{"_id": "a", "title": "the plot", "text": "so sad"}, {"_id": "b", "title": "", "text": "a good film"}]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = ["the plot so sad", "a good film"]
    expected = NearestTexts.from_texts(bundle.open(), texts, 2).predict(["good plot"])[0]
    command.run("predict", str(bundle.path), "--input", str(corpus), "--output", str(tmp_path / "corpus.npy"))
    np.testing.assert_allclose(np.load(tmp_path / "corpus.npy"), bundle.embed(texts), atol=1e-6)
    (tmp_path / "corpus.csv").write_text("name,text\nx,the plot so sad\ny,a good film\n")
    ids = {"corpus.jsonl": ("a", "b"), "corpus.csv": (lines := ("line 2", "line 3")), "corpus.npy": lines}
    for searched, names in ids.items():
        found = open_index(bundle.open(), tmp_path / searched, 2).predict(["good plot"])[0]
        assert [text for text, _ in found.texts] == [text for text, _ in expected.texts]
        assert found.ids == tuple(names[texts.index(text)] for text, _ in found.texts)
    words = ["predict", str(bundle.path), "--input", str(tmp_path / "corpus.csv"), "--against", str(corpus)]
    assert command.run(*words, "--output", str(tmp_path / "found.jsonl")).code == 0
    (first, _) = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert first["prediction"][0] == {"id": "a", "text": "the plot so sad", "score": pytest.approx(1, abs=1e-4)}
    (tmp_path / "corpus.csv").write_text("name,body\nx,so sad\n")
    result = command.run("predict", str(bundle.path), "so sad", "--against", str(tmp_path / "corpus.csv"))
    assert (result.code, "has the columns name, body" in result.err) == (2, True)
    (tmp_path / "corpus.tsv").write_text("name\ttext\nx\tso sad\tmore\n")
    with pytest.raises(DataError, match="line 2: 3 cells, not 2 as expected"):
        open_index(bundle.open(), tmp_path / "corpus.tsv")


def test_quantise_and_trim(bundle: Bundle, data: Path, tmp_path: Path) -> None:
    copy = bundle.copy_to(tmp_path / "copy")
    found = compress.quantize(copy, data=data, method="dynamic")
    assert found.proof.metric == "spearman"
    compress.trim(str(bundle.path), tmp_path / "trimmed", data=data)
    trimmed = Bundle.load(tmp_path / "trimmed")
    texts = ["a good film"]
    exact = bundle.embed(texts, precision="fp32")
    np.testing.assert_allclose(trimmed.embed(texts, precision="fp32"), exact, atol=1e-5)


@pytest.mark.usefixtures("hastened")
@pytest.mark.parametrize(
    "sizes", [["target.hidden=0.5", "target.heads=0.5", "target.ffn=0.5"], ["target.max_params=3500"]]
)
def test_pruning_keeps_the_width_of_vectors(bundle: Bundle, data: Path, tmp_path: Path, sizes: list[str]) -> None:
    options = RunOptions(overrides=(*sizes, "stages.recover.epochs=1", "stages.recover.lr=1e-3"))
    made = compress.prune(model=bundle.path, data=data, out=tmp_path / "run", options=options)
    weights = load_file(made.path / "2_Dense/model.safetensors")["linear.weight"]
    assert weights.shape == (32, 8)
    assert (made.task.kind, made.task.width) == ("embedding", 32)


@pytest.mark.usefixtures("hastened")
def test_search_keeps_the_space(teacher: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.benchmark.devices.open_device", weighing)
    (tmp_path / "space.yaml").write_text(SPACE.replace("hinton.soft_targets", "leaf.l2, only: embedding"))
    words = ["search", "--teacher", str(teacher), "--data", str(data), "--space", str(tmp_path / "space.yaml")]
    words += ["--max-params", "6000", "--trials", "3", "--finalists", "2", "--shapes", "5", "--rounds", "2"]
    words += ["--kind", "embedding", "--out", str(tmp_path / "study")]
    result = command.run(*words)
    assert result.code == 0, result.err
    (made,) = [Bundle.load(path.parent) for path in (tmp_path / "study").rglob("manifest.json")]
    assert (made.task.kind, made.task.width) == ("embedding", 32)


def test_export_for_text(bundle: Bundle, tmp_path: Path) -> None:
    out = tmp_path / "text"
    result = command.run("export", str(bundle.path), "--for", "text", "--out", str(out))
    assert result.code == 0, result.err
    (file,) = out.rglob("*.onnx")
    texts = ["a good film", "So sad!"]
    found = np.array([each.numbers for each in run_text(file, texts)])  # type: ignore[union-attr]
    np.testing.assert_allclose(found, bundle.embed(texts), atol=1e-5)


PROMPTS = TextPreparation({"query": "sad ", "document": "good film "})


@pytest.fixture(scope="module")
def prompted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A student of texts alone, whose teacher lowers them, has a default prompt, and does not pool prompts."""
    place = tmp_path_factory.mktemp("prompted")
    pooling = Pooling(("mean",), 32, include_prompt=False)
    settings = SentenceSettings((pooling, Normalize()), replace(PROMPTS, default="document"), similarity="dot")
    encoder(settings, layers=2).save_pretrained(place / "teacher")
    cased = tiny.tokenizer()
    cased.backend_tokenizer.normalizer = type(cased.backend_tokenizer.normalizer)(lowercase=False)
    cased.save_pretrained(place / "teacher")
    sizes = {"max_seq_length": 12, "do_lower_case": True}
    (place / "teacher/sentence_roberta_config.json").write_text(json.dumps(sizes))
    rng = np.random.default_rng(1)
    words = [word for word in tiny.WORDS if word.isalpha()]
    lines = sorted({" ".join(rng.choice(words, 3 + n % 14)) for n in range(160)})
    (place / "texts.txt").write_text("\n".join(lines) + "\n")
    (place / "recipe.yaml").write_text(RECIPE.replace("max_length: 16", "max_length: auto"))
    with pytest.MonkeyPatch.context() as patch:
        unshipped.hasten(patch)
        return compress.distill(
            teacher=place / "teacher", data=place / "texts.txt", recipe=place / "recipe.yaml", out=place / "run"
        )


HARD = ["", "A Good FILM", "so [SEP] sad [sep]", "the plot " * 20]


def test_a_teacher_agrees_with_itself(prompted: Bundle) -> None:
    """Once texts were scored with other prompts than their similarities were computed with."""
    rows = {row.role: row.score for row in prompted.report().rows}
    assert rows["teacher"]["spearman"] == pytest.approx(1.0, abs=1e-6)
    assert rows["student"]["spearman"] < 0.999


def test_a_student_prepares_texts_as_its_teacher(prompted: Bundle) -> None:
    found = SentenceFolder.read(prompted.path)
    assert prompted.manifest.max_length == found.settings.max_length == 12
    assert prompted.task.preparation == found.settings.preparation == replace(PROMPTS, default="document")
    assert (found.settings.similarity, found.settings.leaves_out_prompts) == ("dot", True)


@pytest.mark.parametrize("name", [None, "query", "document"])
def test_prompts_are_applied_once_everywhere(name: str | None, prompted: Bundle) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = library.SentenceTransformer(str(prompted.path), device="cpu")
    expected = model.encode(HARD, prompt_name=name)
    assert np.abs(model.encode(HARD, prompt="") - expected).max() > 0.01
    np.testing.assert_allclose(prompted.embed(HARD, precision="fp32", prompt_name=name), expected, atol=1e-5)
    predictor = prompted.open("fp32")
    predictor = predictor if name is None else predictor.with_prompt(name)
    answers = np.array([each.numbers for each in predictor.predict(HARD)])  # type: ignore[union-attr]
    np.testing.assert_allclose(answers, expected, atol=1e-5)


def test_a_prompt_of_ones_own(prompted: Bundle) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = library.SentenceTransformer(str(prompted.path), device="cpu")
    for prompt in ("", "very very "):
        found = prompted.embed(HARD, precision="fp32", prompt=prompt)
        np.testing.assert_allclose(found, model.encode(HARD, prompt=prompt), atol=1e-5)
    with pytest.raises(CompressError, match="Did you mean 'query'"):
        prompted.embed(HARD, prompt_name="queries")
    with pytest.raises(BundleError, match="expected one of them"):
        prompted.embed(HARD, prompt_name="query", prompt="")


def test_a_text_file_puts_the_default_prompt_before_texts(prompted: Bundle, tmp_path: Path) -> None:
    proof = text_file(prompted, tmp_path / "text.onnx", precision="fp32")
    assert proof.prompt == "good film "
    found = np.array([each.numbers for each in run_text(tmp_path / "text.onnx", HARD)])  # type: ignore[union-attr]
    np.testing.assert_allclose(found, prompted.embed(HARD, precision="fp32"), atol=1e-5)
    text_file(prompted, tmp_path / "plain.onnx", precision="fp32", prompt="")
    found = np.array([each.numbers for each in run_text(tmp_path / "plain.onnx", HARD)])  # type: ignore[union-attr]
    np.testing.assert_allclose(found, prompted.embed(HARD, precision="fp32", prompt=""), atol=1e-5)
    with pytest.raises(ExportError, match="ends like the beginning of the token"):
        text_file(prompted, tmp_path / "odd.onnx", precision="fp32", prompt="film [S")


def test_a_search_uses_the_prompts_of_queries_and_documents(prompted: Bundle, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = library.SentenceTransformer(str(prompted.path), device="cpu")
    found = NearestTexts.from_texts(prompted.open(precision="fp32"), HARD[1:]).predict(["a slow story"])
    cosines = model.encode_query("a slow story") @ model.encode_document(HARD[1:]).T
    expected = sorted(zip(HARD[1:], cosines.tolist(), strict=True), key=lambda each: -each[1])
    assert [text for text, _ in found[0].texts] == [text for text, _ in expected]
    np.testing.assert_allclose([cosine for _, cosine in found[0].texts], [each for _, each in expected], atol=1e-5)
    (tmp_path / "lines.txt").write_text("\n".join(HARD[1:]) + "\n")
    words = ["predict", str(prompted.path), "--input", str(tmp_path / "lines.txt"), "--precision", "fp32"]
    command.run(*words, "--output", str(tmp_path / "lines.npy"), "--prompt-name", "query")
    stripped = [text.strip() for text in HARD[1:]]
    np.testing.assert_allclose(np.load(tmp_path / "lines.npy"), model.encode_query(stripped), atol=1e-5)
    result = command.run("predict", str(prompted.path), "a", "--prompt-name", "none_such")
    assert (result.code, "prompt 'none_such'" in result.err) == (2, True)
    result = command.run("predict", str(prompted.path), "a", "--prompt-name", "query", "--against", "x.txt")
    assert (result.code, "leave the option out" in result.err) == (2, True)


def test_queries_that_are_passages_too_are_scored_with_the_prompt_of_queries(prompted: Bundle, tmp_path: Path) -> None:
    """Paraphrases in both directions, and a query that is among its own negatives."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = library.SentenceTransformer(str(prompted.path), device="cpu")
    texts = [text for word in tiny.WORDS[:8] for text in (f"{word} film", f"the {word} story")]
    lines = [f"{text}\t{texts[n ^ 1]}\t{text}" for n, text in enumerate(texts)]
    (tmp_path / "dev.tsv").write_text("\n".join(["query\tpositive\tnegative", *lines]))
    (tmp_path / "train.txt").write_text("so sad\nso fun\n")
    exam = prompted.evaluator(load_task(str(tmp_path), kind="embedding", metric="mrr@10").validation)
    found = exam.scores(prompted.logits(exam.rows, precision="fp32"))["mrr@10"]
    cosines = (
        model.encode_query(texts, normalize_embeddings=True) @ model.encode_document(texts, normalize_embeddings=True).T
    )
    np.fill_diagonal(cosines, -2)
    ranks = [1 + (row > row[n ^ 1]).sum() for n, row in enumerate(cosines)]
    assert found == pytest.approx(np.mean([1 / rank if rank <= 10 else 0 for rank in ranks]))


def test_formats_that_pool_prompts_too_are_refused(prompted: Bundle, tmp_path: Path) -> None:
    result = command.run("export", str(prompted.path), "--for", "openvino", "--out", str(tmp_path / "out"))
    assert (result.code, "include_prompt is false" in result.err) == (2, True)
    result = command.run("demo", str(prompted.path), "--out", str(tmp_path / "page"))
    assert (result.code, "include_prompt is false" in result.err) == (2, True)


def test_vectors_that_the_cosine_does_not_rank_are_not_searched(tmp_path: Path) -> None:
    settings = SentenceSettings((Pooling(("mean",), 32),), similarity="dot")
    model = encoder(settings)
    made = tiny.bundle(tmp_path / "bundle", model=model, task=replace(TASK, width=32))
    with pytest.raises(BundleError, match="similarity_fn_name of this model is dot"):
        NearestTexts.from_texts(made.open(), ["a", "b"])


def test_prompts_that_nobody_is_given_are_noted(data: Path, teacher: Path) -> None:
    loaded = load_teacher("it", teacher, TASK)
    set_settings(loaded.model.config, replace(MEAN, preparation=TextPreparation({"s2p_query": "sad "})))
    task_data = load_task(str(data), kind="embedding")
    assert "s2p_query" in with_teacher(task_data, loaded.model.config).notes[-1]


def test_another_similarity_than_the_cosine_is_noted(data: Path, teacher: Path) -> None:
    loaded = load_teacher("it", teacher, TASK)
    set_settings(loaded.model.config, SentenceSettings((Pooling(("mean",), 32),), similarity="dot"))
    (note,) = with_teacher(load_task(str(data), kind="embedding"), loaded.model.config).notes[-1:]
    assert note == "similarity_fn_name of the teacher is dot; scores here compare vectors by their cosine"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (split([[], [], [], []], [[], [], [], []], []), ["text", "sad", "good", "text"]),
        (split([[1], []], [[1.0], []], []), ["text", "text"]),
        (split([[1], [], []], [[1.0], [], []], [1, 2]), ["sad", "good", "good"]),
    ],
    ids=["alone", "in pairs", "queries and passages"],
)
def test_texts_get_the_prompts_of_their_purpose(rows: Dataset, expected: list[str]) -> None:
    tokenizer = tiny.tokenizer(("text", *tiny.WORDS))
    found = encode(rows, tokenizer, 16, preparation=PROMPTS)
    assert [tokenizer.decode(row["input_ids"]).split()[1] for row in found] == expected
    assert found["prompt_length"][:] == [{"text": 0, "sad": 2, "good": 3}[word] for word in expected]


def test_a_row_without_prompts_has_no_prompt_length() -> None:
    rows = encode(split([[], []], [[], []], []), tiny.tokenizer(), 16)
    assert "prompt_length" not in rows.column_names
