"""Which words are replaced, by what, and what is left as it is."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

import compress
from compress.config.options import LengthOptions
from compress.config.recipe import Recipe
from compress.config.reference import Call
from compress.config.reference import check as check_call
from compress.data import Task, cache, load_task
from compress.data.corpus import Corpus
from compress.data.tokenize import encode
from compress.errors import DataError, RecipeError
from compress.models import precision
from compress.training import replacements, schedule, stage
from compress.training.augment import FEW_ROWS_TO_LEARN, add_stages, make_variants, missing_label
from compress.training.replacements import CandidateOptions, find_candidates, nearest
from compress.training.scoring import improves
from compress.training.unlabelled import cut, draw, takes_texts, with_texts
from tests import marked, tiny
from tests.papers.case import authors
from tests.unshipped import Trained

TEXT = "the Actor is good , a film of 1984 badly slow"
"""Not asked about: stop words (the, is, a, of), the number, the comma. `badly` is two tokens."""


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "choose", lambda _: "fp32")


@pytest.fixture(scope="module")
def lm() -> Any:
    return tiny.model("bert", head=AutoModelForMaskedLM)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.tokenizer()


def found(text: str, lm: Any, tokenizer: Any, **asked: Any) -> dict[str, list[str]]:
    table = find_candidates(pa.array([text]), lm, tokenizer, CandidateOptions(**{"most": 7} | asked))
    row = table.to_pylist()[0]
    return {text[a:b]: some for a, b, some in zip(row["starts"], row["ends"], row["candidates"], strict=True)}


def filled(
    text: str, places: Sequence[int], lm: Any, tokenizer: Any, *, beside: bool, most: int = 7
) -> list[list[str]]:
    """What the model says at these tokens of the text, all masked at once, without any batching."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    masked = [tokenizer.mask_token_id if at in places else each for at, each in enumerate(ids)]
    row, types = [2, *masked, 3], [0] * (len(ids) + 2)
    if beside:
        row, types = [*row, *ids, 3], [*types, *[1] * (len(ids) + 1)]
    with torch.no_grad():
        logits_LV = lm(input_ids=torch.tensor([row]), token_type_ids=torch.tensor([types])).logits[0]
    best = [logits_LV[1 + at, : len(tokenizer)].topk(most).indices.tolist() for at in places]
    names = [tokenizer.convert_ids_to_tokens(each) for each in best]
    return [[name for name in each if not name.startswith("##") and name not in tiny.SPECIAL] for each in names]


@pytest.mark.parametrize("beside", [True, False])
def test_candidates_of_a_single_token_are_the_models_most_probable(beside: bool, lm: Any, tokenizer: Any) -> None:
    got = found(TEXT, lm, tokenizer, beside=beside)
    tokens = tokenizer.tokenize(TEXT)
    for word in ("Actor", "good", "film", "slow"):
        assert got[word] == filled(TEXT, [tokens.index(word.lower())], lm, tokenizer, beside=beside)[0], word


def test_stop_words_numbers_and_signs_are_left_alone(lm: Any, tokenizer: Any) -> None:
    assert set(found(TEXT, lm, tokenizer)) == {"Actor", "good", "film", "badly", "slow"}


def test_words_masked_in_one_pass_are_not_neighbours(lm: Any, tokenizer: Any) -> None:
    text = "film good slow fun"
    first, second = filled(text, [0, 2], lm, tokenizer, beside=True), filled(text, [1, 3], lm, tokenizer, beside=True)
    got = found(text, lm, tokenizer, together=2)
    assert got == {"film": first[0], "good": second[0], "slow": first[1], "fun": second[1]}


def test_batches_change_nothing(lm: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = pa.array([TEXT, "", "good film", "the", "slow sharp warm story"])
    options = CandidateOptions(7)
    together = find_candidates(texts, lm, tokenizer, options).to_pylist()
    monkeypatch.setattr("compress.training.replacements.REPLACEMENTS_ENCODING", "another")
    monkeypatch.setattr("compress.training.replacements.TOKENS_PER_BATCH", 1)
    monkeypatch.setattr("compress.training.replacements.TEXTS_PER_WRITE", 2)
    assert find_candidates(texts, lm, tokenizer, options).to_pylist() == together
    assert [len(row["starts"]) for row in together] == [5, 0, 2, 0, 4]


def test_candidates_of_a_longer_word_have_near_vectors(lm: Any, tokenizer: Any) -> None:
    table = lm.get_input_embeddings().weight.detach()
    ids = tokenizer.get_vocab()
    pool = sorted({"badly", "slow"} | {word for word in tiny.WORDS if word.isalpha()})
    vectors = [table[[ids["bad"], ids["##ly"]]].mean(0) if word == "badly" else table[ids[word]] for word in pool]
    cosine = [float(torch.cosine_similarity(vector, vectors[pool.index("badly")], 0)) for vector in vectors]
    order = [pool[at] for at in np.argsort(-np.array(cosine)) if pool[at] != "badly"]
    assert nearest({"badly", "slow"}, lm, tokenizer, most=5, file=None) == {"badly": order[:5]}
    assert found(TEXT, lm, tokenizer)["badly"] == order[:7]


def test_vectors_may_come_from_a_glove_file(lm: Any, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "glove.txt"
    file.write_text("badly 1 0\ngood -1 0.1\n, 1 0\nbad 2 0.1\npoor 1 1\n", encoding="utf-8")
    assert found(TEXT, lm, tokenizer, vectors=str(file))["badly"] == ["bad", "poor", "good"]
    file.write_text("good 1 0\n", encoding="utf-8")
    assert "badly" not in found(TEXT, lm, tokenizer, vectors=str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [("badly 1 0\ngood 1\n", "line 2: 1 numbers"), ("badly one\n", "line 1: expected a word"), (", 1\n", "no word")],
)
def test_an_invalid_file_of_vectors_is_refused(
    content: str, message: str, lm: Any, tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "glove.txt").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        found(TEXT, lm, tokenizer, vectors=str(tmp_path / "glove.txt"))
    with pytest.raises(DataError, match="no such file"):
        found(TEXT, lm, tokenizer, vectors=str(tmp_path / "none.txt"))


def test_byte_level_tokens_are_words_with_their_space_before_them() -> None:
    words = ["good", "film", "dull"]
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4, "Ġ": 5}
    vocabulary |= {letter: 6 + at for at, letter in enumerate(sorted(set("".join(words))))}
    merges = []
    for word in words:
        whole = "Ġ"
        for letter in word:
            merges.append((whole, letter))
            whole += letter
            vocabulary.setdefault(whole, len(vocabulary))
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    special = {"pad": "<pad>", "mask": "<mask>", "cls": "<s>", "sep": "</s>", "unk": "<unk>"}
    named = {f"{role}_token": token for role, token in special.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    lm = tiny.model("roberta", head=AutoModelForMaskedLM, vocab_size=len(vocabulary), pad_token_id=1)
    got = found("good film dull", lm, tokenizer, most=len(vocabulary))
    assert set(got) == set(words)
    for some in got.values():
        assert set(words) <= set(some) and all(each == each.strip() for each in some)


def test_candidates_are_cached(lm: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = found(TEXT, lm, tokenizer)
    monkeypatch.setattr("compress.training.replacements.read", None)
    assert found(TEXT, lm, tokenizer) == first
    with pytest.raises(TypeError):
        found(TEXT, lm, tokenizer, most=3)
    other = tiny.model("bert", head=AutoModelForMaskedLM, seed=1)
    with pytest.raises(TypeError):
        found(TEXT, other, tokenizer)


def test_words_that_the_model_has_no_room_for_stay(tokenizer: Any) -> None:
    short = tiny.model("bert", head=AutoModelForMaskedLM, max_position_embeddings=9)  # [CLS] 3 [SEP] 3 [SEP]
    assert set(found("good film slow fun", short, tokenizer)) == {"good", "film", "slow"}


# Variants


def drawn(*args: Any, copies: int = 200, probability: float = 0.5, seed: int = 0) -> list[str]:
    return make_variants(*args, np.random.default_rng(seed), copies, probability)


SLOTS = [(4, 9, ["story", "plot"]), (13, 17, ["bad", "dull", "poor"])]


def test_variants_differ_and_use_candidates_only() -> None:
    got = drawn("The Actor is good!", SLOTS)
    possible = {f"The {a} is {b}!" for a in ("Actor", "story", "plot") for b in ("good", "bad", "dull", "poor")}
    assert len(set(got)) == len(got) and set(got) == possible - {"The Actor is good!"}


def test_every_word_is_replaced_with_the_given_probability_and_evenly() -> None:
    many = [(at, at + 1, ["x", "y", "z"]) for at in range(0, 2000, 2)]
    (text,) = drawn("a " * 1000, many, copies=1, probability=0.4)
    share = {letter: text.count(letter) / 1000 for letter in "axyz"}
    assert share["a"] == pytest.approx(0.6, abs=0.05)
    assert share["x"] == pytest.approx(share["y"], abs=0.05) == pytest.approx(share["z"], abs=0.05)


class Scripted:
    """A generator that draws what it is told, as the authors' code draws it: word by word."""

    def __init__(self, picked: Sequence[int], chance: Sequence[float]) -> None:
        self.picked, self.chance = picked, chance

    def random(self, size: tuple[int, int]) -> Any:
        return np.resize(self.chance, size)

    def integers(self, counts: Sequence[int], size: tuple[int, int]) -> Any:
        return np.resize(self.picked, size) % np.array(counts)


def test_variants_equal_those_of_the_authors_code() -> None:
    given, expected = authors("tinybert")
    text, candidates = given["short"], given["candidates"]
    slots = [(text.index(word), text.index(word) + len(word), some) for word, some in candidates.items()]
    rng: Any = Scripted(given["picked"], given["chance"])
    assert [text, *make_variants(text, slots, rng, given["copies"], given["probability"])] == expected["variants"]


def test_the_authors_code_asks_about_the_same_words(lm: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Here stop words are scikit-learn's too, and words with accents stay, which theirs takes off."""
    given, expected = authors("tinybert")
    file = tmp_path / "glove.txt"  # each word of the text has a neighbour
    file.write_text("\n".join(f"{word} 1 0" for word in {*re.findall("[a-z]+", given["text"]), "other"}), "utf-8")
    asked = list(found(given["text"], lm, tokenizer, masked=False, vectors=str(file)))
    assert asked == [word for word in expected["words"] if word not in {"well", "made", "serious", "cafe", "naive"}]


def test_neighbours_are_those_of_the_authors_code_among_the_words_of_letters(
    lm: Any, tokenizer: Any, tmp_path: Path
) -> None:
    given, expected = authors("tinybert")
    file = tmp_path / "glove.txt"
    file.write_text(given["glove"], encoding="utf-8")
    got = nearest({given["near"]}, lm, tokenizer, most=given["most"], file=str(file))[given["near"]]
    assert expected["near"] == [",", "poorly", "mp3", "awfully"]
    assert got == ["poorly", "awfully", "well"]


# Rows


def split(**columns: Sequence[Any]) -> Dataset:
    return Dataset.from_dict(dict(columns))


def rows(data: Dataset, lm: Any, tokenizer: Any, *, seed: int = 0, **options: Any) -> list[dict[str, Any]]:
    made = Call("tinybert.augment", options)(data, lm, tokenizer, rng=np.random.default_rng(seed))
    assert isinstance(made, Iterator)
    return list(made)


SINGLE = split(text=[TEXT, "a the", "a slow film"], label=[0, 1, 1])


def test_each_row_is_followed_by_its_variants_with_its_label(lm: Any, tokenizer: Any) -> None:
    got = rows(SINGLE, lm, tokenizer, copies=3)
    starts = [at for at, row in enumerate(got) if row in SINGLE.to_list()]
    assert [got[at] for at in starts] == SINGLE.to_list()
    assert starts[0] == 0 and starts[2] == starts[1] + 1, "nothing can be replaced in `a the`"
    for start, end, label in zip(starts, [*starts[1:], len(got)], (0, 1, 1), strict=True):
        assert end - start <= 4 and {row["label"] for row in got[start:end]} == {label}
        assert len({row["text"] for row in got[start:end]}) == end - start


def test_the_same_generator_gives_the_same_rows_and_another_others(lm: Any, tokenizer: Any) -> None:
    assert rows(SINGLE, lm, tokenizer) == rows(SINGLE, lm, tokenizer) != rows(SINGLE, lm, tokenizer, seed=1)


def test_many_rows_are_the_same_as_few(lm: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = rows(SINGLE, lm, tokenizer)
    monkeypatch.setattr("compress.training.augment.ROWS_PER_DRAW", 2)
    assert rows(SINGLE, lm, tokenizer) == at_once


def test_of_a_pair_each_side_changes_while_the_other_stays(lm: Any, tokenizer: Any) -> None:
    pairs = split(text=["good film", "slow"], text_pair=["the plot", "fun scene"], label=[[1.0, 0.0], [0.0, 0.0]])
    got = rows(pairs, lm, tokenizer, copies=4)
    first = [row for row in got if row["label"] == [1.0, 0.0]]
    assert first[0] == pairs[0]
    changed = [(row["text"] != "good film", row["text_pair"] != "the plot") for row in first[1:]]
    assert set(changed) == {(True, False), (False, True)}
    assert changed == sorted(changed, reverse=True), "the first side's variants come first"


QUESTIONS = split(
    id=["1"], question=["good film"], context=["the good film is a fun story"], answers=[["fun story"]], starts=[[19]]
)
TAGGED = split(words=[["A", "good", "film", "!"]], tags=[[0, 1, 2, 0]])


def test_questions_change_and_their_context_stays(lm: Any, tokenizer: Any) -> None:
    got = rows(QUESTIONS, lm, tokenizer)
    assert got[0] == QUESTIONS[0] and len(got) > 5
    assert all({**row, "question": "good film"} == QUESTIONS[0] for row in got)


def test_words_change_one_for_one_and_keep_their_tags(lm: Any, tokenizer: Any) -> None:
    got = rows(TAGGED, lm, tokenizer)
    assert got[0] == TAGGED[0] and len(got) > 5
    assert {(len(row["words"]), row["words"][0], row["words"][3]) for row in got} == {(4, "A", "!")}
    assert all(row["tags"] == [0, 1, 2, 0] for row in got)


@pytest.mark.parametrize("data", [split(text=["good film", "slow"], label=[0.5, 4.0]), QUESTIONS, TAGGED])
def test_classes_only_leaves_other_tasks_alone(data: Dataset, lm: Any, tokenizer: Any) -> None:
    assert rows(data, lm, tokenizer, classes_only=True) == data.to_list()
    assert len(rows(data, lm, tokenizer)) > len(data)


@pytest.mark.parametrize("labels", [[0, 1], [[1.0, 0.0], [1.0, 1.0]]])
def test_classes_only_varies_classes(labels: list[Any], lm: Any, tokenizer: Any) -> None:
    assert len(rows(split(text=["good film", "slow"], label=labels), lm, tokenizer, classes_only=True)) > 2


def test_a_limit_chooses_rows_by_the_generator(lm: Any, tokenizer: Any) -> None:
    data = split(text=["good film", "slow scene", "dull plot", "fun story"], label=[0, 1, 2, 3])
    chosen = set()
    for seed in range(8):
        got = rows(data, lm, tokenizer, limit=1, seed=seed)
        labels = [row["label"] for row in got]
        assert sorted(set(labels)) == [0, 1, 2, 3]
        (one,) = {label for label in labels if labels.count(label) > 1}
        chosen.add(one)
    assert len(chosen) > 1


def test_chosen_rows_of_a_data_set_are_read_in_their_order(lm: Any, tokenizer: Any) -> None:
    got = rows(SINGLE.select([2, 0]), lm, tokenizer, copies=1)
    assert [row["text"] for row in got if row in SINGLE.to_list()] == ["a slow film", TEXT]


# Refused


@pytest.mark.parametrize("options", [{"copies": 0}, {"candidates": 0}, {"together": 0}, {"probability": 0.0}])
def test_senseless_numbers_are_refused(options: dict[str, Any], lm: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="expected at least 1 of the first three"):
        rows(SINGLE, lm, tokenizer, **options)


def test_a_model_that_fills_in_no_masks_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="BertModel cannot fill in masks"):
        rows(SINGLE, tiny.bert().bert, tokenizer)


def near_words(data: Dataset, encoder: Any, tokenizer: Any, **options: Any) -> list[dict[str, Any]]:
    return list(Call("tinybert.near_words", options)(data, encoder, tokenizer, rng=np.random.default_rng(0)))


def test_near_words_take_no_language_model(tokenizer: Any) -> None:
    encoder = tiny.bert().bert
    got = near_words(SINGLE, encoder, tokenizer, candidates=3)
    made = {row["text"] for row in got} - set(SINGLE["text"])
    last = {text.split()[-1] for text in made if text.startswith("the")}
    assert last == {"slow", *nearest({"slow"}, encoder, tokenizer, most=3, file=None, single_tokens=True)["slow"]}
    assert got[0] == SINGLE[0] and len(got) > 10


PAIRS = Dataset.from_dict({
    "text": ["the film was good", "the film was bad", "a sharp plot", "a dull plot"],
    "text_pair": ["a good film", "a bad film", "the plot is sharp", "the plot is dull"],
    "label": [1, 1, 0, 0],
})  # fmt: skip


def test_texts_are_paired_with_similar_ones(tokenizer: Any) -> None:
    def make(**options: Any) -> list[dict[str, Any]]:
        return near_words(PAIRS, tiny.bert().bert, tokenizer, copies=1, **options)

    plain, more = make(), make(partners=1)
    assert more[: len(plain)] == plain
    added = more[len(plain) :]
    assert {row["label"] for row in added} == {-100} and len(added) == 2 * len(PAIRS)
    known = {(row["text"], row["text_pair"]) for row in PAIRS}
    made = {(row["text"], row["text_pair"]) for row in added}
    assert not made & known
    assert {text for text, _ in made} <= set(PAIRS["text"]) and {text for _, text in made} <= set(PAIRS["text_pair"])
    assert make(partners=1) == more, "the same generator gives the same rows"
    assert len(make(partners=50)) == len(plain) + 2 * 4 * 3, "every other text of the column, both ways"


def test_the_nearest_texts_are_the_partners(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.training.augment.WIDER", 1)
    got = near_words(PAIRS, tiny.bert().bert, tokenizer, copies=1, partners=1)
    made = [(row["text"], row["text_pair"]) for row in got if row["label"] == -100]
    assert ("the film was good", "a bad film") in made and ("a dull plot", "the plot is sharp") in made


@pytest.mark.parametrize(("label", "missing"), [(0.5, "nan"), ([1.0, 0.0], ["nan", "nan"]), (3, -100)])
def test_labels_that_are_missing(label: Any, missing: Any) -> None:
    found = missing_label(label)
    assert [str(each) for each in found] == missing if isinstance(found, list) else str(found) == str(missing)


def test_single_texts_have_no_partners(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="`partners` needs pairs"):
        near_words(SINGLE, tiny.bert().bert, tokenizer, partners=1)


def test_a_recipe_may_name_it() -> None:
    assert check_call(Call("tinybert.near_words", {"copies": 10}), "here", given=["rng"]) == []
    assert check_call(Call("tinybert.augment", {"copies": 10, "limit": None}), "here", given=["rng"]) == []
    (problem,) = check_call(Call("tinybert.augment", {"copys": 10}), "here", given=["rng"])
    assert "Did you mean 'copies'?" in problem


ONE_STAGE = """
paper: {title: A tiny test, authors: Nobody, year: 2025, url: https://example.org}
about: One stage on augmented rows.
teacher: {finetune: teacher, steps: 24, batch: 16, lr: 1.0e-2, max_length: 32, evaluate: 1}
teacher_lm: {pretrain: teacher-lm, head: masked_lm, corrupt: bert.mask, steps: 2, batch: 8, max_length: 32, lr: 1.0e-3,
             objective: [{loss: bert.masked_lm}]}
student: {layers: 1}
stages:
  - distill: prediction
    augment: {by: tinybert.BY, copies: 3}
    steps: 4
    batch: 8
    max_length: 32
    lr: 1.0e-3
    objective: [{loss: hinton.soft_targets}]
"""


@pytest.mark.parametrize(("by", "speaks"), [("augment", True), ("near_words", False)])
def test_a_language_model_is_trained_only_if_needed(by: str, speaks: bool, tmp_path: Path, home: Path) -> None:
    recipe = tiny.recipe(tmp_path / "recipe", ONE_STAGE.replace("BY", by))
    data = tiny.reviews(tmp_path / "data")
    compress.distill(teacher=tiny.checkpoint(tmp_path / "teacher"), recipe=recipe, data=data, out=tmp_path / "run")
    (file,) = (home / "augmented").glob("*/*.arrow")
    assert 96 < len(cache.table(file)) <= 96 * 4
    assert (tmp_path / "run" / "stages" / "teacher-lm").is_dir() == speaks


OPEN = (
    ONE_STAGE.replace("{by: tinybert.BY, copies: 3}", "auto")
    .replace("    steps: 4\n", "    epochs: auto\n")
    .replace("prediction", "answers")
)


def near_words_of(copies: int, **options: int) -> Call:
    return Call("tinybert.near_words", {"copies": copies, **options})


@pytest.mark.parametrize(
    ("changes", "rows", "texts", "read"),
    [
        ([], FEW_ROWS_TO_LEARN, 1, near_words_of(20)),
        ([], 96, 2, near_words_of(10, partners=5)),
        ([], 96, 0, None),
        ([], FEW_ROWS_TO_LEARN + 1, 1, None),
        (["stages.0.steps=4"], 96, 1, None),
        (["stages.0.epochs=3"], 96, 1, None),
        (["stages.0.effort=quick"], FEW_ROWS_TO_LEARN, 1, near_words_of(4)),
        (["stages.0.effort=quick"], 96, 2, near_words_of(2, partners=1)),
        (["stages.0.effort=quick"], 96, 0, None),
    ],
)
def test_a_stage_on_few_rows_reads_variants(
    changes: list[str], rows: int, texts: int, read: Call | None, tmp_path: Path
) -> None:
    recipe = Recipe.load(tiny.recipe(tmp_path, OPEN), changes)
    assert recipe.training[0].augment == "auto"
    resolved = add_stages(recipe, rows, texts=texts)
    assert [(stage.name, stage.augment) for stage in resolved.training] == [("answers", read)]
    assert Recipe.load(tiny.recipe(tmp_path / "again", resolved.to_yaml())) == resolved


def test_new_pairs_need_a_teacher_that_answers(tmp_path: Path) -> None:
    alone = OPEN.replace("distill: answers", "finetune: answers").replace("hinton.soft_targets", "bert.labels")
    (stage,) = add_stages(Recipe.load(tiny.recipe(tmp_path, alone)), 96, texts=2).training
    assert stage.augment == near_words_of(10)
    with pytest.raises(RecipeError, match="has `partners`"):
        Recipe.load(
            tiny.recipe(tmp_path, alone.replace("augment: auto", "augment: {by: tinybert.near_words, partners: 1}"))
        )


@pytest.mark.parametrize(
    ("effort", "rows", "first", "added"),
    [
        ("normal", FEW_ROWS_TO_LEARN + 1, None, None), ("normal", 96, None, near_words_of(8)),
        ("quick", FEW_ROWS_TO_LEARN + 1, None, None), ("quick", 96, near_words_of(4), None),
    ],
)  # fmt: skip
def test_texts_of_a_corpus_join_the_variants(effort: str, rows: int, first: Any, added: Any, tmp_path: Path) -> None:
    recipe = Recipe.load(tiny.recipe(tmp_path, OPEN), [f"stages.0.effort={effort}"])
    resolved = add_stages(recipe, rows, corpus=True)
    assert [(stage.name, stage.augment, stage.corpus) for stage in resolved.training] == [
        ("answers", first, False), ("answers-augmented", added, True),
    ]  # fmt: skip
    assert Recipe.load(tiny.recipe(tmp_path / "again", resolved.to_yaml())) == resolved


def test_added_stages_have_new_names(tmp_path: Path) -> None:
    recipe = Recipe.load(tiny.recipe(tmp_path, OPEN))
    (stage,) = recipe.training
    both = recipe.model_copy(update={"stages": (stage, stage.model_copy(update={"name": "answers-augmented"}))})
    assert [each.name for each in add_stages(both, 96, corpus=True).stages] == [
        "answers", "answers--augmented", "answers-augmented", "answers-augmented--augmented",
    ]  # fmt: skip


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train for at most eight steps, however many rows there are."""
    for name, value in (("LEAST_AUTO_STEPS", 4), ("MOST_AUTO_STEPS", 8), ("VARIED", (4, 8)), ("EPOCHS", 0)):
        monkeypatch.setattr(schedule, name, value)


def with_corpus(folder: Path, *texts: str) -> dict[str, Any]:
    """Write the arguments of a run that goes on with these texts."""
    (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return {
        "recipe": tiny.recipe(folder / "recipe", OPEN), "data": tiny.reviews(folder / "data"),
        "teacher": tiny.checkpoint(folder / "teacher"), "corpus": str(folder / "texts.txt"), "out": folder / "run",
    }  # fmt: skip


@pytest.mark.parametrize("better", [True, False])
def test_a_student_that_texts_do_not_improve_stays_as_it_was(
    better: bool, tmp_path: Path, brief: None, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "improves", lambda ended, begun, rows: better)
    with pytest.raises(Trained):
        compress.distill(**with_corpus(tmp_path, "good film", "bad film"))
    plain, varied = (tmp_path / "run" / "stages" / name for name in ("answers", "answers-augmented"))
    first, last = (load_file(folder / "model" / "model.safetensors") for folder in (plain, varied))
    assert all(torch.equal(first[name], tensor) for name, tensor in last.items()) != better
    found = stage.Trained.read(varied / "model")
    assert found.steps > 0
    assert better or (found.best_step, found.score) == (0, stage.Trained.read(plain / "model").score)


def test_the_same_rows_are_not_trained_on_twice(
    tmp_path: Path, brief: None, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "PLAIN_WORD", re.compile(r"[α-ω]+"))
    given = with_corpus(tmp_path)
    Path(given["corpus"]).write_text(load_task(given["data"]).train[0]["text"] + "\n", encoding="utf-8")
    with pytest.raises(Trained):
        compress.distill(**given)
    plain, varied = (tmp_path / "run" / "stages" / name / "model" for name in ("answers", "answers-augmented"))
    assert (plain / "model.safetensors").read_bytes() == (varied / "model.safetensors").read_bytes()
    assert stage.Trained.read(varied).steps == 0


@pytest.mark.parametrize(
    ("score", "distance", "better"),
    [(0.9, 0.5, True), (0.7, 0.1, False), (0.82, 0.5, False), (0.78, 0.1, True), (0.8, 0.3, False), (0.82, None, True)],
)
def test_the_distance_decides_if_the_score_is_not_significant(
    score: float, distance: float | None, better: bool
) -> None:
    begun, ended = {"score": 0.8, "distance": 0.3}, {"score": score, "distance": distance or 0.0}
    if distance is None:
        begun.pop("distance")
    assert improves(ended, begun, 100) == better, "the standard error of 100 rows is 0.05"


def corpus_of(*documents: str) -> Corpus:
    return Corpus("texts", str(hash(documents)), lambda: iter(documents))


@pytest.mark.parametrize(
    ("like", "expected"),
    [
        ("Good. Bad.\nA long line.", ["One. Two.\nThree and four.", "Five."]),
        ("Good. Bad.", ["One. Two.", "Three and four.", "Five."]),
        ("Good.", ["One.", "Two.", "Three and four.", "Five."]),
    ],
)
def test_documents_are_cut_to_the_length_of_the_tasks_texts(like: str, expected: list[str]) -> None:
    assert list(cut(corpus_of("One. Two.\nThree and four.", " ", "Five."), [like])) == expected


def test_texts_are_drawn_once_and_with_equal_chance() -> None:
    texts = [f"text {number % 100}" for number in range(200)]
    drawn = [draw(texts, {hash("text 7")}, np.random.default_rng(seed), most=10) for seed in range(400)]
    assert all(len(set(some)) == 10 and "text 7" not in some for some in drawn)
    counts = Counter(text for some in drawn for text in some)
    assert len(counts) == 99 and all(15 < count < 75 for count in counts.values()), "40 are expected, 6 the deviation"


def test_a_corpus_gives_a_task_rows_without_labels(tmp_path: Path, home: Path) -> None:
    data = load_task(tiny.reviews(tmp_path / "data"))
    known = [data.train[0]["text"], data.validation[0]["text"]]
    rows = with_texts(data.train, data, corpus_of(*known, "good film", "bad film", "good film"), seed=0)
    assert rows["text"][: len(data.train)] == data.train["text"][:]
    assert rows["label"][: len(data.train)] == data.train["label"][:]
    assert set(rows["text"][len(data.train) :]) == {"good film", "bad film"}
    assert rows["label"][len(data.train) :] == [-100, -100]
    assert rows.features == data.train.features


def test_a_corpus_gives_a_tagger_sentences_without_tags(tmp_path: Path, home: Path) -> None:
    for split in ("train", "dev", "test"):
        marked.sentences(tmp_path / f"{split}.conll", seed=len(split))
    data = load_task(str(tmp_path))
    known = "  ".join(data.validation[0]["words"])
    rows = with_texts(
        data.train, data, corpus_of(known, "so good, the film!", "@me: bad", "so good , the film !"), seed=0
    )
    assert rows.features == data.train.features
    count = len(data.train)
    assert rows[:count] == data.train[:]
    added = {tuple(row["words"]): set(row["tags"]) for row in rows.select(range(count, len(rows)))}
    assert added == {("so", "good", ",", "the", "film", "!"): {-1}, ("@me", ":", "bad"): {-1}}
    encoded = encode(rows, tiny.tokenizer(), 32)
    labels = encoded[len(encoded) - 1]["labels"]
    assert {label for label in labels if label != -100} == {-1}, "predicted, but without a tag"


def test_tasks_without_texts_are_refused_before_training(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load_task(tiny.reviews(tmp_path / "data"))
    pair = replace(data, task=replace(data.task, text=("one", "other")))
    with pytest.raises(DataError, match="pair classification"):
        with_texts(pair.train, pair, corpus_of("good film"), seed=0)
    assert not takes_texts(data, replace(corpus_of("good film"), parallel=True))
    for kind in ("qa", "embedding"):
        assert not takes_texts(replace(data, task=Task(**vars(data.task) | {"kind": kind})), corpus_of("good film"))
    monkeypatch.setattr("compress.teachers.checkpoint.with_head", lambda *_, **__: pytest.fail("was trained"))
    recipe = tiny.recipe(tmp_path / "recipe", OPEN.replace("augment: auto", "corpus: true"))
    with pytest.raises(DataError, match="--corpus"):
        compress.distill(
            teacher=tiny.checkpoint(tmp_path / "teacher"), recipe=recipe, data=str(tmp_path / "data"),
            out=tmp_path / "run",
        )  # fmt: skip


def test_only_a_stage_with_a_teacher_of_the_task_reads_texts(tmp_path: Path) -> None:
    alone = OPEN.replace("distill: answers", "finetune: answers").replace("hinton.soft_targets", "bert.labels")
    recipe = Recipe.load(tiny.recipe(tmp_path, alone))
    assert not any(stage.corpus for stage in add_stages(recipe, 96, corpus=True).training)
    with pytest.raises(RecipeError, match="corpus"):
        Recipe.load(tiny.recipe(tmp_path, alone.replace("augment: auto", "corpus: true")))


@pytest.mark.parametrize("read", [True, False])
def test_corpus_and_effort_are_read_or_a_warning_printed(
    read: bool, tmp_path: Path, brief: None, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()
    monkeypatch.setattr("compress.teachers.inputs.warn", lambda console, message: seen.append(message))
    recipe = tiny.recipe(tmp_path / "recipe", OPEN if read else OPEN.replace("epochs: auto", "steps: 4"))
    (tmp_path / "texts.txt").write_text("good film\n\nbad film\n", encoding="utf-8")
    data, teacher = tiny.reviews(tmp_path / "data"), tiny.checkpoint(tmp_path / "teacher")
    with pytest.raises(Trained):
        compress.distill(
            teacher=teacher,
            recipe=recipe,
            data=data,
            out=tmp_path / "run",
            corpus=str(tmp_path / "texts.txt"),
            length=LengthOptions(effort="quick"),
        )
    assert (tmp_path / "run" / "stages" / "answers-augmented" / "model").is_dir() == read
    unread = [message for message in seen if message.startswith("no stage of tiny reads")]
    assert [message.split()[5].rstrip(";") for message in unread] == ([] if read else ["--corpus", "--effort"])
