"""Random checkpoints: the loaded model computes what transformers' own class computes in float32, or a refusal names
what is wrong.

Drawn are the family, the head, the number format, the shards, the names of the labels, what config.json says and lacks,
and up to three changes of the files, of which each is harmless or has to be refused.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from compress.errors import CompressError
from compress.exporters.checkpoint import Checkpoint, load_source
from compress.models import teacher as teachers
from tests import tiny
from tests.campaign.cases import WHOLE, Record, draw, record

COUNT = 1000 if WHOLE else 40
HEADS: Mapping[str, Any] = {
    "none": AutoModel,
    "language": AutoModelForMaskedLM,
    "classification": AutoModelForSequenceClassification,
    "tagging": AutoModelForTokenClassification,
    "qa": AutoModelForQuestionAnswering,
}
FAMILIES = tuple(tiny.FAMILIES)
AMBIGUOUS = {
    ("modernbert", "classification"),
    ("modernbert", "tagging"),
    ("llama", "classification"),
    ("llama", "tagging"),
}
"""Heads of families whose taggers have the same tensors as their classifiers."""
FORMATS = (torch.float32, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Draft:
    """A checkpoint that is being made: what will be written, and what has to be refused of it."""

    rng: Random
    family: str
    head: str
    model: Any
    weights: dict[str, Tensor]
    config: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    shards: int = 1
    refusals: list[str] = field(default_factory=list)

    def layer_tensor(self) -> str:
        """Draw a matrix of a layer."""
        names = [name for name, tensor in self.weights.items() if re.search(r"\.\d+\.", name) and tensor.dim() == 2]
        return self.rng.choice(sorted(names))

    def prefix(self) -> str:
        return "" if self.head == "none" else f"{self.model.base_model_prefix}."

    def refuse(self, pattern: str) -> None:
        self.refusals.append(pattern)


Change = Callable[[Draft], None]


def positions_in_the_file(draft: Draft) -> None:
    draft.weights[f"{draft.prefix()}embeddings.position_ids"] = torch.arange(64)[None]


def other_positions_in_the_file(draft: Draft) -> None:
    draft.weights[f"{draft.prefix()}embeddings.position_ids"] = torch.arange(64)[None] + 1
    draft.refuse("position_ids")


def unread_pooler(draft: Draft) -> None:
    """Only where the class has no pooler, and the family's encoder has one."""
    own = AutoModel.from_config(draft.model.config).state_dict()
    for name, tensor in own.items():
        if name.startswith("pooler.") and draft.head in ("tagging", "qa"):
            draft.weights[draft.prefix() + name] = tensor.clone()


def strays(draft: Draft) -> None:
    draft.files |= {"consolidated.safetensors": b"no weights", "optimizer.pt": b"x", "README.md": b"# A model"}
    draft.files["model-00001-of-00099.safetensors"] = b"no weights"


def unknown_settings(draft: Draft) -> None:
    draft.config |= {"finetuning_task": "sst2", "adapters": {"adapters": {}}, "position_embedding_type": "absolute"}
    draft.config |= {"return_dict": False, "attn_implementation": "flash_attention_2"}


def no_architecture(draft: Draft) -> None:
    draft.config["architectures"] = draft.rng.choice([None, [], ["SomebodysModel"], [None]])
    if (draft.family, draft.head) in AMBIGUOUS:
        draft.refuse("architectures")


def number_format_unstated(draft: Draft) -> None:
    draft.config |= draft.rng.choice([{"dtype": None}, {"dtype": None, "torch_dtype": "float16"}, {"dtype": "float32"}])


def missing_tensor(draft: Draft) -> None:
    name = draft.layer_tensor()
    del draft.weights[name]
    draft.refuse(re.escape(name.removeprefix(draft.prefix())))


def missing_head(draft: Draft) -> None:
    names = sorted(name for name in draft.weights if not name.startswith(draft.prefix()))
    if draft.head in ("classification", "tagging", "qa"):
        name = draft.rng.choice(names)
        del draft.weights[name]
        draft.refuse(re.escape(name) if draft.config.get("architectures") else "architecture|missing")


def other_shape(draft: Draft) -> None:
    name = draft.layer_tensor()
    draft.weights[name] = draft.weights[name][:-1].clone()
    draft.refuse(re.escape(name.removeprefix(draft.prefix())))


def extra_tensor(draft: Draft) -> None:
    name = draft.layer_tensor().rpartition(".")[0]
    ending = draft.rng.choice(["distance_embedding.weight", "lora_A.default.weight", "adapters.task.down.weight"])
    draft.weights[f"{name}.{ending}"] = torch.randn(4, 8)
    draft.refuse(re.escape(ending))


def extra_layer(draft: Draft) -> None:
    name = draft.layer_tensor()
    beyond = re.sub(r"\.\d+\.", ".7.", name, count=1)
    draft.weights[beyond] = draft.weights[name].clone()
    draft.refuse(re.escape(beyond))


def extra_head(draft: Draft) -> None:
    draft.weights["my_own_head.weight"] = torch.randn(3, 32)
    draft.refuse(r"my_own_head\.weight")


def quantised(draft: Draft) -> None:
    name = draft.layer_tensor()
    draft.weights[name] = draft.weights[name].to(draft.rng.choice([torch.int8, torch.float8_e4m3fn, torch.uint8]))
    draft.refuse(re.escape(name.removeprefix(draft.prefix())))


def ignored_setting(draft: Draft) -> None:
    settings: dict[str, Any] = {
        "position_embedding_type": "relative_key",
        "pruned_heads": {"0": [0]},
        "adapters": {"adapters": {"a": "b"}},
        "auto_map": {"AutoModel": "own.Model"},
        "quantization_config": {"quant_method": "awq"},
        "problem_type": "yes_or_no",
    }
    name = draft.rng.choice(sorted(settings))
    draft.config[name] = settings[name]
    draft.refuse(name)


def adapters_beside(draft: Draft) -> None:
    name = draft.rng.choice(["adapter_config.json", "config_setfit.json", "model_head.pkl", "quantize_config.json"])
    draft.files[name] = b"{}"
    draft.refuse(re.escape(name))


def other_label_names(draft: Draft) -> None:
    names = draft.rng.choice(
        [("two words", "ü"), ("a\nb", "c\td"), (1, 0), ("", " "), ("LABEL_1", "LABEL_0"), ("007", "1e3")]
    )
    if draft.head in ("classification", "tagging") and len(draft.labels) == 2:
        draft.config |= {"id2label": {"1": names[1], "0": names[0]}, "label2id": {"other": 0}}
        draft.labels = tuple(map(str, names))
        if draft.head == "tagging" and names == ("LABEL_1", "LABEL_0"):
            draft.refuse("have no names")


def wrong_labels(draft: Draft) -> None:
    count = len(draft.labels)
    if draft.head not in ("classification", "tagging") or count < 2:
        return
    names = {str(at): f"x{at}" for at in range(count)}
    wrong: list[dict[str, Any]] = [
        {"id2label": {str(at + 1): f"x{at}" for at in range(count)}},
        {"id2label": {str(2 * at): f"x{at}" for at in range(count)}},
        {"id2label": {f"x{at}": at for at in range(count)}},
        {"id2label": [f"x{at}" for at in range(count)]},
        {"id2label": names | {"1": "x0"}},
        {"id2label": names | {"0": None}},
        {"id2label": names | {str(count): "more"}},
        {"id2label": names, "label2id": {f"x{at}": count - 1 - at for at in range(count)} | {"x0": 7}},
        {"id2label": names, "num_labels": count + 1},
    ]
    draft.config |= {"label2id": None} | draft.rng.choice(wrong)
    draft.refuse("id2label")


def missing_shard(draft: Draft) -> None:
    draft.shards = 3
    draft.files["model-00002-of-00003.safetensors"] = b""
    draft.refuse(r"model-00002-of-00003\.safetensors")


HARMLESS: tuple[Change, ...] = (
    positions_in_the_file, unread_pooler, strays, unknown_settings, no_architecture, number_format_unstated,
    other_label_names,
)  # fmt: skip
FAULTS: tuple[Change, ...] = (
    other_positions_in_the_file, missing_tensor, missing_head, other_shape, extra_tensor, extra_layer, extra_head,
    quantised, ignored_setting, adapters_beside, wrong_labels, missing_shard,
)  # fmt: skip


def sketch(number: int, folder: Path) -> tuple[Draft, Any]:
    """Draw a checkpoint; return it, and the model that transformers loads before anything is changed."""
    rng = draw("checkpoint", number)
    family = rng.choice(FAMILIES)
    count = rng.choice([1, 2, 2, 3, 5])
    config = tiny.config(family, labels=count)
    heads = [name for name, auto in HEADS.items() if auto._model_mapping.get(type(config), None) is not None]
    head = rng.choice(heads)
    if head == "qa":
        config.num_labels = 2
    if head == "tagging":
        config.id2label = {at: f"T{at}" for at in range(config.num_labels)}
        config.label2id = {f"T{at}": at for at in range(config.num_labels)}
    torch.manual_seed(number)
    model = HEADS[head].from_config(config).to(rng.choice(FORMATS)).eval()
    model.save_pretrained(folder)
    expected = HEADS[head].from_pretrained(folder, dtype=torch.float32)
    labels = tuple(config.id2label.values())
    if head not in ("classification", "tagging"):
        labels = ()
    written = json.loads((folder / "config.json").read_text())
    draft = Draft(rng, family, head, model, load_file(folder / "model.safetensors"), written, labels=labels)
    draft.shards = rng.choice([1, 1, 2, 4])
    for change in rng.sample(HARMLESS, rng.randrange(4)):
        change(draft)
    if rng.random() < 0.5:
        rng.choice(FAULTS)(draft)
    return draft, expected


def write(draft: Draft, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(draft.config))
    tiny.tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(draft.weights)
    draft.rng.shuffle(names)
    if draft.shards == 1:
        save_file(draft.weights, folder / "model.safetensors", {"format": "pt"})
    else:
        placed = {
            name: f"model-{1 + at % draft.shards:05}-of-{draft.shards:05}.safetensors" for at, name in enumerate(names)
        }
        for file in set(placed.values()):
            part = {name: draft.weights[name] for name in names if placed[name] == file}
            save_file(part, folder / file, {"format": "pt"})
        index = {"metadata": {}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in draft.files.items():
        (folder / name).write_bytes(content)
        if not content:
            (folder / name).unlink()


def difference(model: Any, expected: Any) -> float:
    ids = torch.randint(5, 45, (2, 11), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, theirs = model(input_ids=ids), expected(input_ids=ids)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours if isinstance(ours[name], Tensor))


def judge(number: int, folder: Path) -> tuple[str, str]:
    """Return how a checkpoint ended (loaded or refused), and what is wrong with that."""
    draft, expected = sketch(number, folder)
    write(draft, folder)
    try:
        found = load_source(str(folder))
        if isinstance(found, Checkpoint) and found.task is not None:
            teachers.load("drawn", folder, found.task)
    except CompressError as error:
        named = any(re.search(pattern, str(error)) for pattern in draft.refusals)
        return "refused", "" if named else f"refused: {error}; expected {draft.refusals or 'to be loaded'}"
    if draft.refusals:
        return "loaded", f"loaded, expected a refusal that names {draft.refusals}"
    assert isinstance(found, Checkpoint)
    labels = found.task.labels if found.task is not None and found.task.kind != "regression" else ()
    if labels != (draft.labels if len(draft.labels) > 1 or draft.head == "tagging" else ()):
        return "loaded", f"labels are {labels}, expected {draft.labels}"
    apart = difference(found.model, expected.base_model if draft.head == "language" else expected)
    return "loaded", "" if apart < 1e-5 else f"differs by {apart} from what transformers computes"


def test_random_checkpoints(tmp_path: Path, record_property: Record) -> None:
    faults: dict[str, str] = {}
    ended = Counter[str]()
    for number in range(COUNT):
        folder = tmp_path / str(number)
        how, problem = judge(number, folder)
        ended[how] += 1
        if problem:
            faults[f"{number}"] = problem
    print(f"{COUNT} random checkpoints: {dict(ended)}")
    assert min(ended["loaded"], ended["refused"]) > COUNT / 5
    record(record_property, "random checkpoints", COUNT, faults)
