"""The facts of every family are those of its models: a tiny one of each is built and asked."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForPreTraining
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

from compress import families
from compress.config.stages import StudentSpec
from compress.exporters.onnx import TracedModel
from compress.families.family import Family
from compress.models.flops import count_parameters as parameters
from compress.models.heads import find_class
from compress.models.student import build
from compress.pruning.shapes import count_parameters, shape_grid
from compress.slicing.cut import slice_model
from compress.slicing.plan import SlicePlan
from compress.slicing.select import choose, magnitude
from compress.slicing.shape import Shape, positions
from compress.slicing.sizes import Sizes
from tests import every_family, tiny
from tests.slicing import families as sliced

FILES = sorted(Path(families.__file__).parent.glob("*.py"))
KNOWN = families.known()
OURS = {"ib-bert": {"intra_bottleneck_size": 48}, "static-embedding": {}}
"""Families of our own classes, which are not in the table of transformers' families."""
NAMES = [family.name for family in KNOWN]
IGNORING_SUMMARY = ("gpt2", "openai-gpt")
"""Families whose classifiers ignore the place that summary_type names."""
SLICED = [family.name for family in KNOWN if family.rules]
PARTS: dict[str, list[dict[str, Any]]] = {
    "ernie": [{"use_task_id": True}],
    "deberta-v2": [{"share_att_key": False, "conv_kernel_size": 3, "conv_act": "gelu"}],
}
FOR_TASKS = (
    "AutoModel",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)
FEWER = {"mobilebert": FOR_TASKS, "t5": ("AutoModelForTokenClassification",)}
"""The heads of families that are not sliced with any other."""
HEADS = (
    *FOR_TASKS,
    "AutoModelForMaskedLM",
    "AutoModelForPreTraining",
    "AutoModelForCausalLM",
)


def encoder(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    if name == "static-embedding":
        return AutoModel.from_config(CONFIG_MAPPING[name](vocab_size=64, hidden_size=32)).eval()
    return every_family.encoder(name, **OURS.get(name, {}), **changes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_no_library(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    found |= {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    outside = {name.partition(".")[0] for name in found if not name.startswith("compress.families")}
    assert outside - {"compress"} <= sys.stdlib_module_names
    assert not {name for name in found if name.startswith("compress.") and not name.startswith("compress.families")}


def test_finding_families_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from compress import families; families.known(); print({'torch', 'transformers'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_the_name_is_the_file() -> None:
    assert [family.name.replace("-", "_") for family in KNOWN] == sorted(
        path.stem for path in FILES if path.stem not in ("__init__", "family", "lookup")
    )
    assert all(families.find(family.name) is family for family in KNOWN)
    for name in ("funnel", "family", "lookup", "deberta_v2", "", "../bert", "bert.FAMILY", "bért", "__init__"):
        assert families.find(name) == Family(name), "the facts of a family that is not known"


def models(name: str) -> Iterator[Any]:
    """A model of this family with each of its usual heads, and with each of the parts that a setting adds."""
    for head in FEWER.get(name, HEADS):
        if find_class(getattr(transformers, head), CONFIG_MAPPING[name]()) is not None:
            yield sliced.model(name, head=getattr(transformers, head), labels=2)
    for settings in PARTS.get(name, ()):
        yield tiny.model(name, **settings)


def test_every_rule_has_a_weight_and_every_weight_a_rule() -> None:
    """With every head; families may share rules, or add to those of another."""
    unused = {pattern for family in KNOWN for pattern in family.rules}
    for name in SLICED:
        for model in models(name):
            SlicePlan.from_model(model)  # refuses a weight without a rule
            found = {weight.rpartition(".")[0] for weight, _ in model.named_parameters(remove_duplicate=False)}
            own = unused & families.find(name).rules.keys()
            unused -= {pattern for pattern in own for module in found if re.fullmatch(pattern, module)}
    assert not unused


@pytest.mark.parametrize("name", SLICED)
def test_parameters_are_counted_without_cutting(name: str) -> None:
    model = sliced.model(name)
    plan, rated = SlicePlan.from_model(model), magnitude(model)
    for sizes in list(shape_grid(model.config, plan).values())[::37]:
        small = slice_model(model, choose(plan, rated, sizes))
        assert count_parameters(model, plan, sizes) == parameters(small), str(sizes)


@pytest.mark.parametrize("name", SLICED)
def test_facts_of_weights(name: str) -> None:
    family, model = families.find(name), sliced.model(name)
    plan = SlicePlan.from_model(model)
    layers: dict[int, set[str]] = {}
    for weight, cut in plan.cuts.items():
        if cut.layer is not None:
            layers.setdefault(cut.layer, set()).add(f"{cut.role} {weight.rpartition('.')[2]}")
    if layers:
        assert family.own_first_layer == (layers[0] - {"relative weight"} != layers[1])
        assert family.inputs_first == any(isinstance(module, Conv1D) for module in model.modules())
    assert family.grouped == (not plan.heads)
    assert family.shared_heads == any(not heads.block for heads in plan.heads.values())
    assert family.bottleneck == (plan.sizes.bottleneck is not None)
    equal = sliced.model(name)
    if hasattr(equal.config, "embedding_size"):
        equal = tiny.model(name, embedding_size=32)
        projects = any(cut.role == "embedding_up" for cut in SlicePlan.from_model(equal).cuts.values())
        assert family.factorised == projects
        assert family.factorised or family.projects_if_different
    fewer = Sizes.from_request(model.config, heads=2, **({"bottleneck": 0.5} if family.bottleneck else {}))
    assert family.own_width == (fewer.attention != (fewer.bottleneck or fewer.hidden))


@pytest.mark.parametrize("name", [family.name for family in KNOWN if family.kin])
def test_families_of_one_kin_begin_as_each_other(name: str) -> None:
    """With embeddings as wide as the stream, which all of them can have."""
    family = families.find(name)
    teacher = tiny.model(name, embedding_size=32) if name == "electra" else sliced.model(name, layers=2)
    for student in [each for each in KNOWN if each.is_cut_from(family)]:
        embedding = 32 if hasattr(CONFIG_MAPPING[student.name](), "embedding_size") else None
        built = build(StudentSpec(family=student.name, layers=1, embedding=embedding, init="teacher"), teacher)
        shape = Shape.from_config(built.config)
        assert (shape.family, shape.layers) == (student.name, 1)
        assert built(**tiny.batch()).logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_facts_of_texts_and_of_computing(name: str) -> None:
    family = families.find(name)
    model = encoder(name)
    config = model.config
    assert family.layered == (Shape.from_config(config).layers > 0)
    assert family.disentangled == any(type(each).__name__ == "DisentangledSelfAttention" for each in model.modules())
    assert family.summary == getattr(config, "summary_type", "first") or name in IGNORING_SUMMARY
    for each in family.undeclared:
        assert not hasattr(CONFIG_MAPPING[name](), each)
    if family.length_setting:
        assert positions(model) == getattr(config, family.length_setting)
    tables = [module for path, module in model.named_modules() if path.endswith("position_embeddings")]
    if family.after_padding:
        (table,) = tables
        assert family.first_position(config) == table.padding_idx + 1 == len(table.weight) - positions(model)  # type: ignore[operator]
    assert family.segments_uncounted <= (not hasattr(config, "type_vocab_size"))
    if family.segments_uncounted:
        ids = torch.arange(5, 12)[None]
        second = (ids > 8).long()
        with torch.no_grad():
            one, both = (model(input_ids=ids, token_type_ids=types)[0] for types in (second * 0, second))
        assert not torch.allclose(one, both), "it reads token types"


def states(model: nn.Module, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
    return found


@pytest.mark.parametrize("name", [family.name for family in KNOWN if family.prepared_mask])
def test_a_prepared_mask_is_the_models_own(name: str) -> None:
    """Of texts longer than any window, one of them padded; and who looks ahead sees the last token."""
    model = encoder(name)
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    model.set_attn_implementation("eager")
    model.config.is_encoder_decoder = False
    ids_BL = torch.randint(5, 60, (2, 21))
    mask_BL = torch.ones_like(ids_BL)
    mask_BL[0, 14:] = 0
    expected = states(model, ids_BL, mask_BL)
    with torch.no_grad():
        found = TracedModel(model)(ids_BL, mask_BL)[0]
    torch.testing.assert_close(found[mask_BL.bool()], expected[mask_BL.bool()], rtol=1e-4, atol=1e-4)
    other_BL = ids_BL.clone()
    other_BL[1, -1] = 61 - other_BL[1, -1]
    changed = (states(model, other_BL, mask_BL) - expected)[1, 17].abs().max() > 1e-6  # within a window of the last
    assert bool(changed) != families.find(name).looks_back


@pytest.mark.parametrize("name", [family.name for family in KNOWN if family.name not in OURS])
def test_bfloat16(name: str) -> None:
    model = encoder(name)
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    ids_BL = torch.randint(5, 60, (2, 8))
    mask_BL = torch.ones_like(ids_BL)
    mask_BL[0, 6:] = 0
    try:
        with torch.autocast("cpu", torch.bfloat16):
            states(model, ids_BL, mask_BL)
        fails = False
    except RuntimeError:
        fails = True
    assert fails == families.find(name).float32_only


@pytest.mark.parametrize("name", [name for name in modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES if name in NAMES])
def test_labels_of_a_head_for_pairs(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForPreTraining.from_config(every_family.config(name, num_labels=5))
    outputs = {
        module.out_features
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.search("seq_relationship|sop_classifier", path)
    }
    assert outputs in ((set(), {2}) if not families.find(name).pair_labels else ({5},))
