"""Loading checkpoints: everything in their files is honoured, or refused by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForTokenClassification,
    BertModel,
    GPT2LMHeadModel,
)

from compress.config.stages import StudentSpec
from compress.data.task import Task
from compress.errors import CompressError, StudentError, TeacherError
from compress.exporters.checkpoint import Checkpoint, load_source
from compress.kinds import find
from compress.models import teacher as teachers
from compress.models.folder import ModelFolder
from compress.models.loader import load_as_saved, load_config, load_model, load_result, load_tokenizer
from compress.models.saved_head import find_head
from compress.models.student import build, check_tokens
from compress.prompting.local_model import open_model
from compress.training.finetune import load_with_head
from compress.training.reranker import load_reranker
from compress.trimming import trim_checkpoint
from tests import generative, tiny

LABELS = ("negative", "positive")
TASK = Task("classification", ("text",), "label", LABELS, "accuracy")
NAMED = {"id2label": dict(enumerate(LABELS)), "label2id": {label: at for at, label in enumerate(LABELS)}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A classifier with the labels of TASK."""
    return Path(tiny.checkpoint(tmp_path / "model", tiny.bert(**NAMED)))


def change_config(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def same(model: Any, other: Any) -> bool:
    """Check that two models compute the same, in float32."""
    ids = torch.randint(5, min(45, model.config.vocab_size), (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = model(input_ids=ids)[0], other(input_ids=ids)[0]
    return bool(ours.dtype == theirs.dtype == torch.float32) and torch.allclose(ours, theirs, atol=1e-5)


# Labels


def test_default_names_that_the_data_has_too_keep_their_numbers(tmp_path: Path) -> None:
    names = [f"LABEL_{number}" for number in range(12)]
    folder = Path(tiny.checkpoint(tmp_path / "model", tiny.bert(12)))
    task = Task("classification", ("text",), "label", tuple(sorted(names)), "accuracy")
    assert names != sorted(names)
    own = load_source(str(folder)).model
    loaded = teachers.load("tiny", folder, task).model
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        answers = [each(input_ids=ids).logits[0] for each in (own, loaded)]
    by_name = [
        dict(zip(order, each.tolist(), strict=True))
        for order, each in zip((names, sorted(names)), answers, strict=True)
    ]
    assert by_name[0] == pytest.approx(by_name[1])


def test_names_that_begin_like_default_ones_are_names(tmp_path: Path) -> None:
    names = {"id2label": {0: "LABEL_POS", 1: "LABEL_NEG"}, "label2id": {"LABEL_POS": 0, "LABEL_NEG": 1}}
    folder = Path(tiny.checkpoint(tmp_path / "model", tiny.bert(2, **names)))
    task = Task("classification", ("text",), "label", ("LABEL_NEG", "LABEL_POS"), "accuracy")
    before = load_source(str(folder)).model.classifier.weight
    assert torch.equal(teachers.load("tiny", folder, task).model.classifier.weight, before.flip(0))


# Tensors that the model has no place for


Change = Callable[[dict[str, Tensor]], Any]


def _relative_positions(weights: dict[str, Tensor]) -> None:
    weights["bert.encoder.layer.0.attention.self.distance_embedding.weight"] = torch.randn(127, 8)


def _adapter(weights: dict[str, Tensor]) -> None:
    weights["bert.encoder.layer.1.output.adapters.task.adapter_down.0.weight"] = torch.randn(4, 32)


def _lora(weights: dict[str, Tensor]) -> None:
    weights["bert.encoder.layer.1.attention.self.query.lora_A.default.weight"] = torch.randn(4, 32)


def _another_layer(weights: dict[str, Tensor]) -> None:
    first = {name: tensor for name, tensor in weights.items() if ".layer.0." in name}
    weights |= {name.replace(".layer.0.", ".layer.2."): tensor.clone() for name, tensor in first.items()}


def _another_pooler(weights: dict[str, Tensor]) -> None:
    weights["bert.pooler.attention.weight"] = torch.randn(1, 32)


def _another_head(weights: dict[str, Tensor]) -> None:
    weights["sentiment.weight"] = torch.randn(2, 32)


def _moved_positions(weights: dict[str, Tensor]) -> None:
    weights["bert.embeddings.position_ids"] = torch.arange(64)[None].flip(1)


def _an_encoder_twice(weights: dict[str, Tensor]) -> None:
    weights["encoder.layer.0.output.dense.weight"] = weights["bert.encoder.layer.0.output.dense.weight"] + 1


UNKNOWN: dict[Change, str] = {
    _relative_positions: "distance_embedding",
    _adapter: "adapter_down",
    _lora: "lora_A",
    _another_layer: r"16 tensors.*layer\.2\.",
    _another_pooler: r"pooler\.attention",
    _another_head: r"sentiment\.weight",
    _moved_positions: "position_ids",
    _an_encoder_twice: r"layer\.0\.output\.dense\.weight",
}


@pytest.mark.parametrize("change", UNKNOWN, ids=lambda change: change.__name__)
def test_tensors_without_a_place_are_refused_by_name(change: Change, folder: Path) -> None:
    change_weights(folder, change)
    with pytest.raises(TeacherError, match=UNKNOWN[change]):
        load_source(str(folder))
    with pytest.raises(TeacherError, match=UNKNOWN[change]):
        teachers.load("tiny", folder, TASK)
    other = Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy")
    with pytest.raises(TeacherError, match=UNKNOWN[change]):  # a new head is wanted: the encoder still counts
        teachers.load("tiny", folder, other)
    with pytest.raises(TeacherError, match=UNKNOWN[change]):
        load_with_head("tiny", folder, "encoder")


def _positions(weights: dict[str, Tensor]) -> None:
    weights["bert.embeddings.position_ids"] = torch.arange(64)[None]


def _language_head(weights: dict[str, Tensor]) -> None:
    other = BertForPreTraining(tiny.bert().config).state_dict()
    weights |= {name: tensor.clone() for name, tensor in other.items() if name.startswith("cls.")}


def _an_encoder_twice_with_the_same_values(weights: dict[str, Tensor]) -> None:
    weights["encoder.layer.0.output.dense.weight"] = weights["bert.encoder.layer.0.output.dense.weight"].clone()


def _old_names(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if "LayerNorm.weight" in name]:
        weights[name.replace("LayerNorm.weight", "LayerNorm.gamma")] = weights.pop(name)


@pytest.mark.parametrize(
    "change", [_positions, _language_head, _an_encoder_twice_with_the_same_values, _old_names], ids=lambda c: c.__name__
)
def test_tensors_that_change_nothing_are_accepted(change: Change, folder: Path) -> None:
    expected = AutoModelForSequenceClassification.from_pretrained(folder)
    change_weights(folder, change)
    assert same(teachers.load("tiny", folder, TASK).model, expected)
    exported = load_source(str(folder))
    assert isinstance(exported, Checkpoint) and same(exported.model, expected)


def test_a_pooler_that_the_head_does_not_read_is_left_unread(tmp_path: Path) -> None:
    """As in many taggers of the hub."""
    config = tiny.bert(3).config
    config.id2label = {0: "O", 1: "B-PER", 2: "I-PER"}
    config.label2id = {name: at for at, name in config.id2label.items()}
    model = BertForTokenClassification(config).eval()
    folder = Path(tiny.checkpoint(tmp_path, model))
    change_weights(folder, lambda weights: weights.update({"bert.pooler.dense.weight": torch.randn(32, 32)}))
    found = load_source(str(folder))
    assert isinstance(found, Checkpoint) and same(found.model, model)


@pytest.mark.parametrize("saved", [BertForMaskedLM, BertForPreTraining, BertModel])
def test_the_heads_of_pre_training_are_left_unread_by_an_encoder(saved: Any, tmp_path: Path) -> None:
    model = saved(tiny.bert().config).eval()
    found = load_source(tiny.checkpoint(tmp_path, model))
    assert isinstance(found, Checkpoint) and same(found.model, model if saved is BertModel else model.bert)


def test_a_classifier_is_no_language_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = generative.gpt2()
    model.save_pretrained(tmp_path)
    generative.gpt2_tokenizer().save_pretrained(tmp_path)
    open_model(str(tmp_path))
    width = model.config.n_embd
    change_weights(tmp_path, lambda weights: weights.update({"score.weight": torch.randn(2, width)}))
    with pytest.raises(TeacherError, match=r"score\.weight"):
        open_model(str(tmp_path))


def test_causal_masks_of_older_versions_are_left_unread(tmp_path: Path) -> None:
    model = generative.gpt2()
    model.save_pretrained(tmp_path)
    generative.gpt2_tokenizer().save_pretrained(tmp_path)
    places = model.config.n_positions
    mask = torch.ones(1, 1, places, places).tril()
    old = {"transformer.h.0.attn.bias": mask.bool(), "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
    change_weights(tmp_path, lambda weights: weights.update(old))
    assert same(load_model(tmp_path, GPT2LMHeadModel).model, model)
    change_weights(tmp_path, lambda weights: weights.update({"transformer.h.0.attn.bias": torch.ones_like(mask)}))
    with pytest.raises(TeacherError, match=r"transformer\.h\.0\.attn\.bias"):
        load_model(tmp_path, GPT2LMHeadModel)


# Missing tensors, and those of another shape


@pytest.mark.parametrize(
    "name", ["classifier.weight", "bert.pooler.dense.bias", "bert.encoder.layer.1.output.dense.weight"]
)
def test_a_missing_tensor_is_named(name: str, folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(name))
    with pytest.raises(TeacherError, match=rf"1 of its tensors are missing, such as {name}"):
        teachers.load("tiny", folder, TASK)
    with pytest.raises(TeacherError, match=name):
        load_source(str(folder))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "base_model.model."])
def test_weights_of_a_wrapped_model_are_to_be_saved_without_it(prefix: str, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(
        {prefix + name: tensor for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(TeacherError, match="save the model inside the wrapper"):
        load_as_saved(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_in_the_place_of_a_file_is_named(name: str, folder: Path) -> None:
    """A clone without git-lfs has these."""
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    with pytest.raises(TeacherError, match=f"{name}: is a pointer of git-lfs"):
        load_source(str(folder))


@pytest.mark.parametrize("number", [0, -1, "512"])
def test_a_limit_of_tokens_is_a_number_above_0(number: Any, folder: Path) -> None:
    change_config(folder, "tokenizer_config.json", model_max_length=number)
    with pytest.raises(TeacherError, match=f"model_max_length {number!r} .* not a number above 0"):
        load_source(str(folder))


def test_outputs_that_the_library_keeps_besides_answers_are_not_asked_for(folder: Path, tmp_path: Path) -> None:
    """A config that asks for attention could be read, but not written again."""
    change_config(folder, output_attentions=True, output_hidden_states=True)
    answer = load_source(str(folder)).model(**tiny.batch())
    assert set(answer) == {"logits"}
    trim_checkpoint(folder, ["good film"], tmp_path / "small")


def test_all_that_is_wrong_is_in_one_message(folder: Path) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        _relative_positions(weights)
        del weights["bert.encoder.layer.0.output.dense.bias"]
        weights["bert.embeddings.word_embeddings.weight"] = torch.randn(7, 32)

    change_weights(folder, spoil)
    with pytest.raises(TeacherError) as caught:
        teachers.load("tiny", folder, TASK)
    for part in ("distance_embedding", "layer.0.output.dense.bias", "word_embeddings.weight (7, 32)", str(folder)):
        assert part in str(caught.value)


def test_outputs_that_the_config_does_not_name(folder: Path) -> None:
    """The head has two outputs; a task with as many labels as the config would otherwise silently train a new one."""
    change_config(folder, id2label={"0": "a", "1": "b", "2": "c"}, label2id=None)
    three = Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy")
    for task in (TASK, three):
        with pytest.raises(TeacherError, match=r"classifier\.weight \(2, 32\), expected \(3, 32\).*id2label"):
            teachers.load("tiny", folder, task)
    with pytest.raises(TeacherError, match="id2label"):
        load_source(str(folder))


# Heads by what they are


HEADS = {"classification": tiny.bert, "tagging": BertForTokenClassification, "qa": BertForQuestionAnswering}


@pytest.mark.parametrize(
    ("kind", "architectures"),
    [
        ("classification", ["MyBertForSequenceClassification"]),
        ("classification", []),
        ("tagging", None),
        ("tagging", ["MyOwnClassifier"]),
        ("qa", [None]),
    ],
    ids=str,
)
def test_a_head_is_known_by_its_tensors(kind: Any, architectures: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny.bert(**NAMED)
    if kind != "classification":
        model = HEADS[kind](model.config).eval()
    folder = Path(tiny.checkpoint(tmp_path, model))
    change_config(folder, architectures=architectures)
    found = load_source(str(folder))
    assert isinstance(found, Checkpoint) and found.task is not None
    assert (found.task.kind, type(found.model)) == (kind, type(model))
    assert same(found.model, model)
    labels = () if kind == "qa" else LABELS
    teacher = teachers.load("tiny", folder, Task(kind, ("question", "context"), "label", labels, find(kind).metrics[0]))
    assert teacher.trained


@pytest.mark.parametrize("architectures", [None, ["MyOwnClassifier"], ["BertModel"], ["BertForMaskedLM"]])
def test_a_head_of_other_tensors_is_refused_by_their_names(architectures: Any, folder: Path) -> None:
    def rename(weights: dict[str, Tensor]) -> None:
        weights["my_head.weight"] = weights.pop("classifier.weight")

    change_weights(folder, rename)
    change_config(folder, architectures=architectures)
    for task in (TASK, Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy")):
        with pytest.raises(TeacherError, match=r"my_head\.weight"):
            teachers.load("tiny", folder, task)
    with pytest.raises(CompressError, match=r"my_head\.weight"):
        load_source(str(folder))


def test_a_classifier_under_the_name_of_an_encoder_is_refused(folder: Path) -> None:
    change_config(folder, architectures=["BertModel"])
    with pytest.raises(TeacherError, match=r"classifier\.bias, classifier\.weight.*BertForSequenceClassification"):
        load_source(str(folder))


def test_a_head_that_could_be_of_two_kinds_is_refused_unless_the_task_says_which(tmp_path: Path) -> None:
    model = tiny.model("modernbert", labels=2, **NAMED)
    folder = Path(tiny.checkpoint(tmp_path, model))
    change_config(folder, architectures=None)
    with pytest.raises(CompressError, match=r"architectures.*ModernBertForSequenceClassification or ModernBertFor"):
        load_source(str(folder))
    assert teachers.load("tiny", folder, TASK).trained


def test_a_head_for_another_task_is_dropped_and_named(tmp_path: Path) -> None:
    model = BertForQuestionAnswering(tiny.bert().config)
    teacher = teachers.load("tiny", Path(tiny.checkpoint(tmp_path / "qa", model)), TASK)
    assert (teacher.trained, teacher.other_head) == (False, "BertForQuestionAnswering")
    several = tiny.bert(**NAMED, problem_type="multi_label_classification")
    teacher = teachers.load("tiny", Path(tiny.checkpoint(tmp_path / "several", several)), TASK)
    assert (teacher.trained, teacher.other_head) == (False, "BertForSequenceClassification")
    assert teachers.load("tiny", Path(tiny.checkpoint(tmp_path / "none")), TASK).other_head == ""


def test_another_class_of_transformers_is_no_head_of_ours(folder: Path) -> None:
    change_config(folder, architectures=["BertForMultipleChoice"])
    head = find_head(ModelFolder(folder), load_config(folder))
    assert (head.part, head.serves("classification")) == ("other", False)


def test_labels_that_differ_by_case_keep_their_outputs(tmp_path: Path) -> None:
    names = ("Neg", "neg")
    model = tiny.bert(id2label=dict(enumerate(names)), label2id={name: at for at, name in enumerate(names)})
    folder = Path(tiny.checkpoint(tmp_path, model))
    task = Task("classification", ("text",), "label", ("neg", "Neg"), "accuracy")
    head = teachers.load("tiny", folder, task).model.classifier
    assert torch.equal(head.weight, model.classifier.weight.flip(0))


# Number formats


def _teacher(folder: Path) -> Any:
    return teachers.load("tiny", folder, TASK).model


def _fine_tuned(folder: Path) -> Any:
    return teachers.load("tiny", folder, Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy")).model


def _encoder(folder: Path) -> Any:
    return load_with_head("tiny", folder, "encoder").model


def _language_model(folder: Path) -> Any:
    return load_with_head("tiny", folder, "masked_lm").model


def _student(folder: Path) -> Any:
    return build(StudentSpec(init=str(folder)), tiny.bert(**NAMED))  # type: ignore[call-arg]


def _result(folder: Path) -> Any:
    return load_result(folder, "task", "classification")


def _exported(folder: Path) -> Any:
    source = load_source(str(folder))
    assert isinstance(source, Checkpoint)
    return source.model


def _vectors(folder: Path) -> Any:
    for name in ("classifier.weight", "classifier.bias"):
        change_weights(folder, lambda weights, name=name: weights.pop(name))  # type: ignore[misc]
    change_config(folder, architectures=["BertModel"])
    return teachers.load("tiny", folder, Task("embedding", ("text",), "similarity", (), "spearman")).model


WAYS = (_teacher, _fine_tuned, _encoder, _language_model, _student, _result, _exported, _vectors)


STATED: tuple[dict[str, Any], ...] = ({}, {"dtype": None}, {"torch_dtype": "float32", "dtype": None})
FORMATS = [(torch.float16, STATED[1]), (torch.bfloat16, STATED[0]), (torch.float64, STATED[2])]


@pytest.mark.parametrize(
    ("way", "dtype", "stated"),
    [
        *((way, torch.bfloat16, stated) for way in WAYS for stated in STATED[:2]),
        *((_teacher, *each) for each in FORMATS),
    ],
)
def test_weights_are_float32_whatever_the_files_hold(
    way: Callable[[Path], Any], dtype: torch.dtype, stated: dict[str, Any], folder: Path
) -> None:
    tiny.bert(**NAMED).to(dtype).save_pretrained(folder)
    change_config(folder, **stated)
    model = way(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.dtype == torch.float32


def test_a_reranker_and_a_prompted_model_are_float32(tmp_path: Path) -> None:
    folder = Path(tiny.checkpoint(tmp_path / "reranker", tiny.bert(1).to(torch.bfloat16)))
    assert load_reranker(folder).model.dtype == torch.float32
    generative.gpt2().to(torch.bfloat16).save_pretrained(tmp_path / "prompted")
    generative.gpt2_tokenizer().save_pretrained(tmp_path / "prompted")
    assert open_model(str(tmp_path / "prompted"), bf16=True).model.dtype == torch.float32


def test_trimming_keeps_the_format_of_the_files(folder: Path, tmp_path: Path) -> None:
    tiny.bert(**NAMED).to(torch.bfloat16).save_pretrained(folder)
    assert load_as_saved(folder).model.dtype == torch.bfloat16
    trim_checkpoint(folder, ["a good film"], tmp_path / "trimmed")
    trimmed = load_file(tmp_path / "trimmed" / "model.safetensors")
    assert {tensor.dtype for tensor in trimmed.values()} == {torch.bfloat16}


@pytest.mark.parametrize("number_format", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused_by_name(number_format: torch.dtype, folder: Path) -> None:
    name = "bert.encoder.layer.0.output.dense.weight"
    change_weights(folder, lambda weights: weights.update({name: weights[name].to(number_format)}))
    with pytest.raises(TeacherError, match=rf"quantised, such as {name}"):
        teachers.load("tiny", folder, TASK)


# Shards


def test_shards_are_read_and_strays_are_not(folder: Path) -> None:
    expected = tiny.bert(**NAMED)
    (folder / "model.safetensors").unlink()
    expected.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    stray = tiny.bert(seed=9).state_dict()
    for name in ("consolidated.safetensors", "model-00001-of-00099.safetensors"):
        save_file(stray, folder / name, {"format": "pt"})
    torch.save(stray, folder / "pytorch_model.bin")
    assert same(teachers.load("tiny", folder, TASK, allow_pickle=True).model, expected)


def test_shards_that_disagree_with_their_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tiny.bert(**NAMED).save_pretrained(folder, max_shard_size="20KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["bert.nowhere.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(TeacherError, match=r"index\.json: lists 1 tensors that no shard holds, such as bert\.nowhere"):
        teachers.load("tiny", folder, TASK)
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    shutil.copy(first, second)
    with pytest.raises(TeacherError, match="another shard holds too"):
        teachers.load("tiny", folder, TASK)


# Tokenizers


def test_pairs_for_a_model_with_one_token_type_are_read_without_types(tmp_path: Path) -> None:
    """As AlephBERT and klue/roberta, whose tokenizer is BERT's."""
    torch.manual_seed(0)
    model = tiny.bert(type_vocab_size=1, **NAMED)
    found = load_source(tiny.checkpoint(tmp_path / "model", model), pair=True)
    assert isinstance(found, Checkpoint)
    bundle = found.write(tmp_path / "bundle")
    pairs = [("a good film", "a bad plot"), ("the actor was dull", "so slow"), ("fun", "!")]
    rows = tiny.tokenizer()(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits.softmax(1)
    ours = torch.tensor([[each.scores[label] for label in LABELS] for each in bundle.predict(pairs, precision="fp32")])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    again = load_tokenizer(bundle.path)("a good film", "a bad plot")
    assert set(again) == {"input_ids", "attention_mask"}


def test_more_token_types_than_the_model_has_are_refused(tmp_path: Path) -> None:
    folder = Path(tiny.checkpoint(tmp_path, tiny.bert(type_vocab_size=2, **NAMED)))
    settings = json.loads((folder / "tokenizer.json").read_text())
    for piece in settings["post_processor"]["pair"]:
        for part in piece.values():
            part["type_id"] *= 2
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}
    change_config(folder, "tokenizer_config.json", **plain)  # BERT's makes its own pairs
    pair = Task("classification", ("one", "other"), "label", LABELS, "accuracy")
    with pytest.raises(TeacherError, match=r"token_type_id 2 .*only 2 token types"):
        teachers.load("tiny", folder, pair)
    assert teachers.load("tiny", folder, TASK).trained


def test_code_of_a_tokenizer_is_refused_by_name(folder: Path) -> None:
    change_config(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    with pytest.raises(TeacherError, match=r"tokenizer_config\.json.*auto_map"):
        teachers.load("tiny", folder, TASK)


def test_a_student_that_begins_as_a_checkpoint_has_the_teachers_tokens(folder: Path) -> None:
    spec = StudentSpec(init=str(folder))  # type: ignore[call-arg]
    assert check_tokens(spec, tiny.tokenizer()) == folder
    reordered = tiny.tokenizer((*tiny.WORDS[1:], tiny.WORDS[0]))
    assert len(reordered) == len(tiny.tokenizer())
    with pytest.raises(
        StudentError, match=rf"{len(tiny.WORDS)} of {len(reordered)} tokens have different ids, such as"
    ):
        check_tokens(spec, reordered)
    with pytest.raises(StudentError, match="different ids"):
        build(spec, tiny.bert(**NAMED), tokenizer=reordered)
    special = tiny.tokenizer()
    special.mask_token = "[UNK]"
    with pytest.raises(StudentError, match=r"mask_token is '\[MASK\]' in the first and '\[UNK\]' in the second"):
        check_tokens(spec, special)


def test_padding_of_the_vocabulary_is_no_difference(folder: Path) -> None:
    padded = tiny.bert(vocab_size=64, **NAMED)
    student = build(StudentSpec(init=str(folder)), padded, tokenizer=tiny.tokenizer())  # type: ignore[call-arg]
    assert student.config.vocab_size == len(tiny.SPECIAL) + len(tiny.WORDS)


def test_a_student_that_begins_as_an_incomplete_checkpoint_is_refused(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("bert.encoder.layer.0.output.dense.weight"))
    with pytest.raises(TeacherError, match=r"layer\.0\.output\.dense\.weight"):
        build(StudentSpec(init=str(folder)), tiny.bert(**NAMED))  # type: ignore[call-arg]


# Every family reads its own files


FAMILIES = (*tiny.FAMILIES, "mpnet", "camembert", "xlm", "flaubert", "big_bird", "squeezebert", "fnet")
AUTOS = (AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_family_is_accounted_for(family: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    for auto in AUTOS:
        config = CONFIG_MAPPING[family](**_sizes(family))
        if auto._model_mapping.get(type(config), None) is None:
            continue
        torch.manual_seed(0)
        model = auto.from_config(config).eval()
        model.save_pretrained(tmp_path / auto.__name__)
        loaded = load_model(tmp_path / auto.__name__, auto)
        assert (loaded.new, loaded.dropped) == (frozenset(), frozenset())
        assert same(loaded.model, model)
        assert find_head(ModelFolder(tmp_path / auto.__name__), loaded.model.config).name == type(model).__name__


def _sizes(family: str) -> dict[str, Any]:
    if family in tiny.FAMILIES:
        config: dict[str, Any] = tiny.config(family).to_dict()
        return config
    if family in ("xlm", "flaubert"):
        return {"n_layers": 2, "emb_dim": 32, "n_heads": 4, "vocab_size": 60, "max_position_embeddings": 64}
    return {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60,
        "max_position_embeddings": 64, "embedding_size": 32, "attention_type": "original_full",
        "pad_token_id": 0,
    }  # fmt: skip
