"""Every setting of a sentence-transformers folder is read, or refused by its name and file.

`tests/campaign/test_sentence_folders.py` compares random folders with the library; here are the rules one by one.
"""

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from torch import Tensor, nn

from compress.commands.inspect import inspect
from compress.config.stages import StudentSpec
from compress.data.task import Task
from compress.data.text_preparation import AS_IT_IS, TextPreparation, count_prompt_tokens
from compress.errors import CompressError, TeacherError
from compress.models import student as students
from compress.models.checkpoints import resolve
from compress.models.folder import MODULES, ModelFolder, list_modules
from compress.models.loader import load_config, load_model, load_tokenizer
from compress.models.sentence_encoder import (
    AutoModelForSentenceEmbedding,
    SentenceEncoder,
    pool_tokens,
    project,
)
from compress.models.sentence_folder import ENCODER_FILES, SentenceFolder, read_encoder, write
from compress.models.sentence_modules import (
    ELEMENTWISE_ACTIVATIONS,
    MODES,
    TOKEN_FEATURE,
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    SentenceModule,
)
from compress.models.sentence_settings import SentenceSettings, find_projection, set_settings, settings_of, width_of
from compress.models.teacher import is_reranker
from compress.models.teacher import load as load_teacher
from compress.slicing.cut import rank_units, slice_model
from compress.slicing.plan import SlicePlan
from compress.slicing.select import choose, magnitude
from compress.training.reranker import load_reranker
from tests import tiny

HIDDEN = 32


def put(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def folder(
    place: Path,
    *modules: tuple[str, Mapping[str, Any]],
    sizes: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    encoder: str = "",
    sizes_name: str = ENCODER_FILES[0],
) -> Path:
    """Write a folder without weights; by default with a mean over the tokens."""
    listed = [{"idx": 0, "name": "0", "path": encoder, "type": "sentence_transformers.models.Transformer"}]
    put(place / encoder / "config.json", {})
    for number, (kind, config) in enumerate(modules or [("Pooling", {"word_embedding_dimension": HIDDEN})], start=1):
        path, dotted = f"{number}_{kind}", f"sentence_transformers.models.{kind}"
        listed.append({"idx": number, "name": str(number), "path": path, "type": dotted})
        put(place / path / "config.json", config)
    put(place / MODULES, listed)
    if sizes is not None:
        put(place / encoder / sizes_name, sizes)
    if model is not None:
        put(place / "config_sentence_transformers.json", model)
    return place


def encoder(settings: SentenceSettings, **sizes: int) -> SentenceEncoder:
    config = tiny.config("bert", **sizes)
    set_settings(config, settings)
    torch.manual_seed(0)
    return AutoModelForSentenceEmbedding.from_config(config).eval()


def vectors(model: Any, texts: list[str]) -> Tensor:
    rows = tiny.tokenizer()(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        found: Tensor = model(**rows).sentence_embedding
    return found


POOLING = {"word_embedding_dimension": HIDDEN}
MEAN = Pooling(("mean",), HIDDEN)


@pytest.mark.parametrize("name", ENCODER_FILES)
@pytest.mark.parametrize("place", ["", "0_Transformer", "parts/encoder"])
def test_the_encoders_file_is_read_under_all_its_names(name: str, place: str, tmp_path: Path) -> None:
    found = SentenceFolder.read(
        folder(tmp_path, sizes={"max_seq_length": 8, "do_lower_case": True}, sizes_name=name, encoder=place)
    )
    assert (found.encoder.max_length, found.encoder.lower_case) == (8, True)
    assert read_encoder(tmp_path) == found.encoder
    assert ModelFolder(tmp_path).encoder == tmp_path / place


def test_the_first_file_that_holds_anything_counts(tmp_path: Path) -> None:
    folder(tmp_path, sizes={})
    put(tmp_path / ENCODER_FILES[1], {"max_seq_length": 9})
    put(tmp_path / ENCODER_FILES[2], {"max_seq_length": 10})
    assert SentenceFolder.read(tmp_path).encoder.max_length == 9


@pytest.mark.parametrize(
    ("given", "tokens", "positions", "expected"),
    [(8, 512, 64, 8), (66, 512, 64, 64), (None, 12, 64, 12), (None, 10**30, 64, 64), (None, 10**30, None, None)],
)
def test_the_length_is_what_the_folder_says_within_the_positions(
    given: int | None, tokens: int, positions: int | None, expected: int | None, tmp_path: Path
) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = tokens
    read = SentenceFolder.read(folder(tmp_path, sizes={"max_seq_length": given}))
    assert read.encoder.choose_length(tokenizer, positions) == expected


def test_of_several_limits_the_last_one_applied_counts(tmp_path: Path) -> None:
    sizes = {"max_seq_length": 30, "tokenizer_args": {"model_max_length": 20}}
    assert SentenceFolder.read(folder(tmp_path / "two", sizes=sizes)).encoder.max_length == 20
    sizes["processing_kwargs"] = {"text": {"max_length": 10}}
    assert SentenceFolder.read(folder(tmp_path / "three", sizes=sizes)).encoder.max_length == 10


def test_texts_are_lowered_but_special_tokens_are_not(tmp_path: Path) -> None:
    cased = tiny.tokenizer(("Film", "film", "good"))
    cased.backend_tokenizer.normalizer = type(cased.backend_tokenizer.normalizer)(lowercase=False)
    cased.add_tokens([AddedToken("GOOD", normalized=False)])
    cased.save_pretrained(tmp_path)
    folder(tmp_path, sizes={"do_lower_case": True})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.tokenize("Film FILM GOOD [SEP] [sep]")[:4] == ["film", "film", "GOOD", "[SEP]"]
    tokenizer.save_pretrained(tmp_path / "again")
    folder(tmp_path / "again", sizes={"do_lower_case": False})
    again = load_tokenizer(tmp_path / "again")
    assert again.tokenize("Film FILM GOOD") == ["film", "film", "GOOD"]


def save_in_place(folder: Path, model: Any, **settings: Any) -> Path:
    """Save a classifier and a cased tokenizer where an older version of the library kept its encoder."""
    place = folder / "0_Transformer"
    model.save_pretrained(place)
    cased = tiny.tokenizer(("Film", "film", "good"))
    cased.backend_tokenizer.normalizer = type(cased.backend_tokenizer.normalizer)(lowercase=False)
    cased.save_pretrained(place)
    put(place / ENCODER_FILES[0], settings)
    return place


@pytest.mark.parametrize("modules", [("Pooling",), ("Pooling", "WordWeights")])
def test_a_teacher_of_another_task_has_the_encoder_of_its_folder(modules: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny.bert(3)
    listed = [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]
    listed += [{"path": f"x_{kind}", "type": f"sentence_transformers.models.{kind}"} for kind in modules]
    put(tmp_path / MODULES, listed)
    save_in_place(tmp_path, model.bert, do_lower_case=True, max_seq_length=8, config_args={"attention_dropout": 0.5})
    with pytest.raises(TeacherError, match="'attention_dropout' is set for its config"):
        load_config(tmp_path)
    dropout = {"attention_probs_dropout_prob": 0.5}
    put(tmp_path / "0_Transformer" / ENCODER_FILES[0], {"do_lower_case": True, "config_args": dropout})
    teacher = load_teacher("t", tmp_path, Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy"))
    assert not teacher.trained
    assert teacher.model.config.attention_probs_dropout_prob == 0.5
    assert teacher.tokenizer.tokenize("Film FILM") == ["film", "film"]
    torch.testing.assert_close(teacher.model.bert.state_dict(), model.bert.state_dict())


def test_ignored_settings_of_the_config_are_refused_beside_it_too(tmp_path: Path) -> None:
    place = tmp_path / "0_Transformer"
    put(tmp_path / MODULES, [{"path": place.name, "type": "sentence_transformers.models.Transformer"}])
    save_in_place(tmp_path, tiny.bert(1), config_args={"position_embedding_type": "relative_key"})
    with pytest.raises(TeacherError, match="position_embedding_type is 'relative_key'"):
        load_config(tmp_path)


def test_a_cross_encoder_reads_texts_as_its_folder_says(tmp_path: Path) -> None:
    model = tiny.bert(1)
    place = save_in_place(tmp_path, model, do_lower_case=True, max_seq_length=7)
    put(tmp_path / MODULES, [{"path": place.name, "type": "sentence_transformers.models.Transformer"}])
    put(tmp_path / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    assert is_reranker(tmp_path)
    reranker = load_reranker(tmp_path)
    assert reranker.tokenizer.model_max_length == 7
    assert reranker.tokenizer.tokenize("Film FILM") == ["film", "film"]
    torch.testing.assert_close(reranker.model.state_dict(), model.state_dict())
    put(place / ENCODER_FILES[0], {"transformer_task": "feature-extraction"})
    with pytest.raises(TeacherError, match="'transformer_task' is 'feature-extraction'"):
        load_reranker(tmp_path)


def test_prompts_are_those_that_the_library_chooses() -> None:
    preparation = TextPreparation({"query": "q: ", "passage": "p: "}, default="passage")
    assert [preparation.prompt(name) for name in (None, "query", "document", "passage")] == ["p: ", "q: ", "", "p: "]
    assert preparation.names == ("query", "document", "passage")
    assert TextPreparation({"s2p_query": "q: "}).unused == ("s2p_query",)
    assert AS_IT_IS.prompt("document") == ""
    with pytest.raises(CompressError, match=r"prompt 'pasage': .* Did you mean 'passage'"):
        preparation.prompt("pasage")


@pytest.mark.parametrize(
    ("kind", "path", "why"),
    [
        ("StaticEmbedding", "", "has word vectors and no encoder"),
        ("WordEmbeddings", "0_WordEmbeddings", "has word vectors and no encoder"),
        ("Router", "", "a model for each purpose of a text"),
        ("BoW", "0_BoW", "counts words and has no encoder"),
    ],
)
def test_a_model_that_begins_otherwise_is_refused_by_its_module(kind: str, path: str, why: str, tmp_path: Path) -> None:
    put(tmp_path / MODULES, [{"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}])
    for read in (resolve, inspect):
        with pytest.raises(TeacherError, match=why):
            read(str(tmp_path))


def test_a_chat_template_is_named(tmp_path: Path) -> None:
    """sentence-transformers 6 puts each text into the template of a model that it saved with one."""
    output = {"method": "forward", "method_output_name": "last_hidden_state"}
    folder(tmp_path, sizes={"modality_config": {"text": output, "message": {**output, "format": "flat"}}})
    with pytest.raises(TeacherError, match="not in a chat template, which 'message' stands for"):
        read_encoder(tmp_path)


@pytest.mark.parametrize(("ids", "expected"), [([2, 7, 3], 2), ([2, 7], 2), ([7], 1), ([], 0), ([2, 3, 3], 2)])
def test_only_the_last_special_token_does_not_belong_to_a_prompt(ids: list[int], expected: int) -> None:
    assert count_prompt_tokens(ids, {2, 3}) == expected


SETTINGS = (
    SentenceSettings((MEAN,)),
    SentenceSettings((MEAN, Normalize()), TextPreparation({"query": "q: "}, "query"), 16, "dot", 8),
    SentenceSettings((Pooling(("mean", "cls"), HIDDEN, include_prompt=False), Dense(2 * HIDDEN, 8, residual=True))),
    SentenceSettings(
        (Dense(HIDDEN, 8, source=TOKEN_FEATURE, target=TOKEN_FEATURE), Pooling(("weightedmean",), 8), Dropout(0.1))
    ),
    SentenceSettings((MEAN, LayerNorm(HIDDEN), Dense(HIDDEN, 8, bias=False, activation="GELU"), Normalize())),
    SentenceSettings((MEAN, Dense(HIDDEN, 8, target="other"), Normalize("other", "sentence_embedding"))),
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_written_is_read(settings: SentenceSettings, tmp_path: Path) -> None:
    put(tmp_path / "config.json", {})
    write(settings, tmp_path)
    assert SentenceFolder.read(tmp_path).settings == settings
    assert SentenceSettings.from_plain(json.loads(json.dumps(settings.to_plain()))) == settings


def test_older_versions_read_what_is_written(tmp_path: Path) -> None:
    """They know flags of pooling, and no keys of version 5 and later."""
    put(tmp_path / "config.json", {})
    write(SentenceSettings((Pooling(("cls",), HIDDEN), Dense(HIDDEN, 8), Normalize())), tmp_path)
    assert json.loads((tmp_path / "1_Pooling/config.json").read_text()) == {
        "word_embedding_dimension": HIDDEN,
        "pooling_mode_cls_token": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    dense = json.loads((tmp_path / "2_Dense/config.json").read_text())
    assert set(dense) == {"in_features", "out_features", "bias", "activation_function"}
    assert [entry.dotted for entry in list_modules(tmp_path)][1] == "sentence_transformers.models.Pooling"


DENSE = {"in_features": HIDDEN, "out_features": 8}


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ([("Pooling", {**POOLING, "pooling_mode": "median"})], r"1_Pooling.config.json: pooling_mode 'median'"),
        ([("Pooling", {**POOLING, "pooling_mode": []})], "pooling_mode is empty"),
        ([("Pooling", {})], "has no 'word_embedding_dimension'"),
        ([("Pooling", {**POOLING, "pooling_mode_mean": True})], "'pooling_mode_mean': is not a key"),
        ([("Pooling", {**POOLING, "include_prompt": "no"})], "'include_prompt' is 'no'; expected bool"),
        ([("Pooling", POOLING), ("Dense", {**DENSE, "activation_function": "torch.nn.PReLU"})], "torch.nn.PReLU"),
        ([("Pooling", POOLING), ("Dense", {**DENSE, "activation_function": "mine.Swish"})], "mine.Swish"),
        ([("Pooling", POOLING), ("Dense", {**DENSE, "module_output_name": "input_ids"})], "'input_ids'"),
        ([("Pooling", POOLING), ("Dense", {**DENSE, "rank": 4})], "2_Dense.config.json: 'rank'"),
        ([("Pooling", POOLING), ("Normalize", {"p": 1})], "2_Normalize.config.json: 'p'"),
        ([("Dense", {**DENSE, "module_input_name": TOKEN_FEATURE})], "no module computes sentence_embedding"),
        ([("Pooling", POOLING), ("CNN", {})], r"sentence_transformers.models.CNN: cannot be read: its vectors depend"),
        ([("Pooling", POOLING), ("Whiten", {})], "models.Whiten: cannot be read: it is not a module of"),
        ([("Transformer", {}), ("Pooling", POOLING)], "expected one Transformer, at the beginning"),
    ],
)  # fmt: skip
def test_modules_that_are_not_read_are_named(
    modules: list[tuple[str, Mapping[str, Any]]], named: str, tmp_path: Path
) -> None:
    with pytest.raises(TeacherError, match=named):
        SentenceFolder.read(folder(tmp_path, *modules))


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"max_seq_len": 8}, "sentence_bert_config.json: 'max_seq_len': .* Did you mean 'max_seq_length'"),
        ({"max_seq_length": "8"}, "'max_seq_length' is '8'; expected a number of tokens, or null"),
        ({"max_seq_length": 0}, "the limit is 0 tokens"),
        ({"query_length": 8}, "'query_length' is 8"),
        ({"transformer_task": "fill-mask"}, "'transformer_task' is 'fill-mask'"),
        ({"modality_config": {"message": {}}}, "'modality_config'"),
        ({"query_expansion": {"strategy": "fixed"}}, "'query_expansion'"),
        ({"tokenizer_args": {"use_fast": False}}, "'use_fast': false"),
        ({"tokenizer_args": {"vocab_file": "x"}}, "tokenizer_args has 'vocab_file'"),
        ({"model_args": {"revision": "x"}}, "model_args has 'revision'"),
        ({"processing_kwargs": {"chat_template": {}}}, "'chat_template': is not a key"),
        ({"processing_kwargs": {"text": {"truncation": False}}}, "'truncation' is False"),
        ({"processing_kwargs": {"text": [8]}}, r"'text' is \[8\]; expected dict"),
    ],
)
def test_settings_of_the_encoder_that_are_not_read_are_named(
    sizes: Mapping[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(TeacherError, match=named):
        SentenceFolder.read(folder(tmp_path, sizes=sizes))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"query_prefix": "[Q]"}, "config_sentence_transformers.json: 'query_prefix'"),
        ({"model_type": "SparseEncoder"}, "'model_type' is 'SparseEncoder'"),
        ({"prompts": {"query": 3}}, "prompt 'query' is 3"),
        ({"default_prompt_name": "s2p"}, "default_prompt_name is 's2p'"),
        ({"similarity_fn_name": "maxsim"}, "similarity_fn_name is 'maxsim'"),
        ({"truncate_dim": 0}, "'truncate_dim' is 0"),
        ({"requirements": {"torch": "<1"}}, "requires torch <1"),
        ({"requirements": {"no-such-package": ">1"}}, "requires no-such-package"),
    ],
)
def test_settings_of_the_model_that_are_not_read_are_named(
    model: Mapping[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(TeacherError, match=named):
        SentenceFolder.read(folder(tmp_path, model=model))


def test_settings_that_change_no_vector_are_read(tmp_path: Path) -> None:
    sizes = {
        "model_args": {"torch_dtype": "float16", "attn_implementation": "flash_attention_2", "trust_remote_code": True},
        "unpad_inputs": True,
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    }
    model = {"__version__": {"sentence_transformers": "6.2.0"}, "requirements": {"pytorch": ">1"}}
    assert SentenceFolder.read(folder(tmp_path, sizes=sizes, model=model)).settings == SentenceSettings((MEAN,))


@pytest.mark.parametrize(
    ("listed", "named"),
    [
        ({}, "holds a dict; expected a list"),
        ([1], "each with a type and a path"),
        ([], "has no modules"),
        ([{"name": "0", "path": "../up", "type": "sentence_transformers.models.Transformer"}], "'../up'"),
        ([{"name": "0", "path": "/etc", "type": "sentence_transformers.models.Transformer"}], "'/etc'"),
        ([{"name": "0", "path": "", "type": "custom_st.Transformer"}], "custom_st.Transformer: is a custom class"),
        (
            [{"name": "0", "path": "x", "type": "sentence_transformers.models.Transformer"}],
            "x.config.json: no such file",
        ),
        (
            [{"name": "0", "path": "", "type": "sentence_transformers.models.Transformer", "kwargs": ["task"]}],
            "'kwargs' is ..task",
        ),
        ([{"name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}] * 2, "two modules named '0'"),
    ],
)
def test_a_list_of_modules_that_is_not_read_is_named(listed: object, named: str, tmp_path: Path) -> None:
    put(tmp_path / "config.json", {})
    put(tmp_path / MODULES, listed)
    with pytest.raises(TeacherError, match=named):
        SentenceFolder.read(tmp_path)


@pytest.mark.parametrize(
    "modules",
    [
        (Pooling(("mean",), 16),),
        (Normalize(), MEAN),
        (MEAN, Dense(16, 8)),
        (MEAN, LayerNorm(16)),
        (MEAN, Normalize("other", "sentence_embedding")),
    ],
)
def test_modules_that_do_not_fit_are_named(modules: tuple[SentenceModule, ...], tmp_path: Path) -> None:
    put(tmp_path / "config.json", {})
    write(SentenceSettings(modules), tmp_path)
    number = next(n for n, module in enumerate(modules, start=1) if module != MEAN)
    with pytest.raises(TeacherError, match=f"module {number}, {modules[number - 1].kind}"):
        SentenceFolder.read(tmp_path).check_width(HIDDEN)


def test_weights_are_read_from_safetensors_or_with_leave_from_a_pickle(tmp_path: Path) -> None:
    model = encoder(SentenceSettings((MEAN, Dense(HIDDEN, 8))))
    model.save_pretrained(tmp_path)
    place = tmp_path / "2_Dense"
    torch.save(dict(model.sentence_modules["1_projection"].state_dict()), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    with pytest.raises(TeacherError, match=r"2_Dense: has only pickled weights, .* --allow-pickle"):
        load_model(tmp_path, AutoModelForSentenceEmbedding)
    again = load_model(tmp_path, AutoModelForSentenceEmbedding, allow_pickle=True).model
    torch.testing.assert_close(vectors(again, ["a good film"]), vectors(model, ["a good film"]))
    (place / "pytorch_model.bin").write_bytes(pickle.dumps(print, protocol=2))
    with pytest.raises(TeacherError, match="hold more than tensors"):
        load_model(tmp_path, AutoModelForSentenceEmbedding, allow_pickle=True)


def test_every_elementwise_activation_needs_no_arguments() -> None:
    numbers = torch.linspace(-3, 3, 7)
    for name in ELEMENTWISE_ACTIVATIONS:
        layer = getattr(nn, name)()
        assert not list(layer.parameters())
        alone = torch.stack([layer(number) for number in numbers])
        torch.testing.assert_close(layer(numbers), alone)


@pytest.mark.parametrize("mode", MODES)
def test_prompts_are_left_out_wherever_they_stand(mode: str) -> None:
    torch.manual_seed(0)
    tokens, visible = torch.randn(2, 6, 3), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    found = pool_tokens(tokens, visible, (mode,), torch.tensor([1, 2]))
    whole = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]]).bool()
    expected = pool_tokens(tokens, whole, (mode,))
    if mode == "weightedmean":  # the weights of places count from the prompt
        weights = torch.tensor([[0, 0, 0, 2, 3, 4], [0, 0, 3, 4, 0, 0]]).float()
        expected = (tokens * weights[:, :, None]).sum(1) / weights.sum(1, keepdim=True)
    torch.testing.assert_close(found, expected)


HEADS = (
    (MEAN, Normalize()),
    (Pooling(("cls", "max", "mean"), HIDDEN), Normalize()),
    (MEAN, LayerNorm(HIDDEN), Dense(HIDDEN, 8), Normalize()),
    (MEAN, Dense(HIDDEN, HIDDEN, residual=True), Dropout(0.1)),
    (MEAN, Dense(HIDDEN, 8, activation="GELU"), Dense(8, 12, residual=True), Normalize()),
    (Dense(HIDDEN, HIDDEN, source=TOKEN_FEATURE, target=TOKEN_FEATURE), Pooling(("mean", "lasttoken"), HIDDEN)),
    (Normalize(TOKEN_FEATURE, TOKEN_FEATURE), MEAN),
    (Pooling(("max", "mean"), HIDDEN), Dense(2 * HIDDEN, 8), Normalize()),
)


@pytest.mark.parametrize("modules", HEADS)
def test_a_projection_changes_nothing_until_the_encoder_is_cut(modules: tuple[SentenceModule, ...]) -> None:
    texts = ["a good film", "so sad , and so slow !"]
    model = encoder(SentenceSettings(modules), layers=1)
    before = vectors(model, texts)
    project(model)
    assert find_projection(model.settings.modules) is not None
    torch.testing.assert_close(vectors(model, texts), before)
    plan = SlicePlan.from_model(model)
    whole = slice_model(model, rank_units(plan, magnitude(model, plan)))
    torch.testing.assert_close(vectors(whole, texts), before, atol=1e-5, rtol=1e-4)
    narrow = slice_model(model, choose(plan, magnitude(model, plan), replace(plan.sizes, hidden=16, head_size=4)))
    assert width_of(narrow.config) == before.shape[1]
    assert vectors(narrow, texts).shape == before.shape


@pytest.mark.parametrize("modules", HEADS)
def test_students_have_the_modules_of_their_teacher(modules: tuple[SentenceModule, ...], tmp_path: Path) -> None:
    taught = encoder(SentenceSettings(modules, TextPreparation({"query": "sad "}, "query"), 20), layers=2)
    whole: Any = students.build(StudentSpec(layers=2, init="teacher"), taught, kind="embedding")
    texts = ["a good film", "so sad"]
    torch.testing.assert_close(vectors(whole.eval(), texts), vectors(taught, texts))
    spec = StudentSpec(layers=1, hidden=16, heads=2, ffn=32, init="teacher")
    narrow: Any = students.build(spec, taught, kind="embedding")
    assert width_of(narrow.config) == width_of(taught.config)
    assert settings_of(narrow.config).preparation == settings_of(taught.config).preparation
    own, theirs = narrow.sentence_modules.state_dict(), taught.sentence_modules.state_dict()
    for name in own.keys() & theirs.keys():
        if "projection" not in name:
            torch.testing.assert_close(own[name], theirs[name])
    narrow.save_pretrained(tmp_path)
    again = load_model(tmp_path, AutoModelForSentenceEmbedding).model
    torch.testing.assert_close(vectors(again, texts), vectors(narrow.eval(), texts))
