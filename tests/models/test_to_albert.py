"""Turn a BERT into an ALBERT: exactly if nothing is dropped, else approximately."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from compress.config.reference import find
from compress.errors import StudentError
from compress.models.sharing import share
from compress.papers.albert import from_bert
from tests import tiny

SEGMENTS = {"token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0], [0] * 7])}


def albert(*, seed: int = 1, head: Any = AutoModelForSequenceClassification, **changes: Any) -> Any:
    return tiny.model("albert", seed=seed, head=head, **{"layers": 4, "embedding_size": 32, **changes})


def converted(teacher: Any, *, layer: str | int = "average", **changes: Any) -> Any:
    student = albert(**changes)
    from_bert(student, teacher, layer=layer)
    return student


def embedded(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the input of the first layer, (B, L, D)."""
    with torch.no_grad():
        base = model.base_model
        if model.config.model_type == "albert":
            return base.encoder.embedding_hidden_mapping_in(base.embeddings(**batch))
        out = base.embeddings(**batch)
        return base.embeddings_project(out) if hasattr(base, "embeddings_project") else out


def ids(batch: dict[str, Tensor], **more: Tensor) -> dict[str, Tensor]:
    return {"input_ids": batch["input_ids"], **more}


def logits(model: Any, **more: Tensor) -> Tensor:
    with torch.no_grad():
        return model(**tiny.batch(), **more).logits


def uneven(model: Any) -> Any:
    """Give norms a gain and a shift, as after training, and padding rows other values than zero."""
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if "LayerNorm" in name or name.endswith("bias"):
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def test_recipes_find_it() -> None:
    assert find("albert.from_bert") is from_bert


# Exact


@pytest.mark.parametrize(
    ("family", "changes", "student_changes"),
    [
        ("bert", {}, {}),
        ("bert", {}, {"embedding_size": 48}),
        ("bert", {"hidden_act": "relu", "layer_norm_eps": 1e-2}, {}),
        ("ernie", {"use_task_id": True}, {}),
        ("roberta", {"max_position_embeddings": 65}, {}),  # one token type; positions begin after the padding index
    ],
)
def test_a_group_per_layer_is_exact(
    family: str, changes: dict[str, Any], student_changes: dict[str, Any], tmp_path: Path
) -> None:
    teacher = uneven(tiny.model(family, layers=4, **changes))
    student = converted(teacher, num_hidden_groups=4, **student_changes)
    more = {} if family == "roberta" else SEGMENTS
    torch.testing.assert_close(logits(student, **more), logits(teacher, **more), rtol=0, atol=2e-4)
    long = ids(tiny.batch((64,)))
    torch.testing.assert_close(embedded(student, long), embedded(teacher, long), rtol=0, atol=1e-4)
    student.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded), logits(student))
    assert family == "roberta" or (logits(teacher) - logits(teacher, **SEGMENTS)).abs().max() > 0.1, "types matter"
    assert (logits(albert(num_hidden_groups=4)) - logits(teacher)).abs().max() > 0.1


@pytest.mark.parametrize("embedding", [8, 16, 24])
def test_a_factorised_embedding(embedding: int) -> None:
    """ELECTRA's E of 16: exact from there on. Its encoder too; the head's activation is another."""
    teacher = uneven(tiny.model("electra", layers=4))
    student = converted(teacher, num_hidden_groups=4, embedding_size=embedding)
    batch = ids(tiny.batch(), **SEGMENTS)
    difference = (embedded(student, batch) - embedded(teacher, batch)).abs().max()
    assert difference < 1e-4 if embedding >= 16 else difference > 0.1
    assert torch.equal(student.albert.pooler.weight, teacher.classifier.dense.weight)


# A narrower embedding


def errors(teacher: Any, widths: tuple[int, ...]) -> list[float]:
    """Mean squared error of the embedding, each row of the vocabulary at every fifth position."""
    V = teacher.config.vocab_size
    batch = {"input_ids": torch.arange(V)[:, None].expand(V, 13), "position_ids": torch.arange(0, 64, 5)[None]}
    target = embedded(teacher, batch)
    return [(embedded(converted(teacher, embedding_size=E), batch) - target).pow(2).mean().item() for E in widths]


def test_the_error_falls_with_width() -> None:
    found = errors(uneven(tiny.model("bert", layers=4)), (4, 8, 16, 24, 31, 32))
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1e-9
    assert found[-2] > 1e-3


def test_a_low_rank_table_is_exact() -> None:
    """Words, positions and types in 7 dimensions in common: E = 8 holds them, as a norm takes one dimension."""
    teacher = uneven(tiny.model("bert", layers=4))
    plane = torch.randn(7, 32, generator=torch.Generator().manual_seed(3))
    tables = teacher.bert.embeddings
    for table in (tables.word_embeddings, tables.position_embeddings, tables.token_type_embeddings):
        table.weight.data = table.weight.data[:, :7] @ plane
    exact, short = errors(teacher, (8, 7))
    assert exact < 1e-9
    assert short > 1e-3
    student = converted(teacher, embedding_size=8, num_hidden_groups=4)
    torch.testing.assert_close(logits(student, **SEGMENTS), logits(teacher, **SEGMENTS), rtol=0, atol=2e-4)


def test_directions_are_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random directions, or the leading ones without the mean cosine, leave a larger error."""
    from compress.models import to_albert

    teacher = tiny.model("bert", layers=4)
    ours = errors(teacher, (12,))
    found = to_albert.directions

    def other(change: Callable[[Tensor, Any], tuple[Tensor, Any]]) -> Any:
        return lambda *tables, **settings: change(*found(*tables, **settings))

    centred = torch.eye(32).double() - 1 / 32
    drawn = torch.linalg.qr(centred @ torch.randn(32, 11).double()).Q
    for change in (lambda _, gain: (drawn, gain), lambda basis, _: (basis, 1.0)):
        monkeypatch.setattr(to_albert, "directions", other(change))
        assert errors(teacher, (12,)) > ours


# Shared layers


@pytest.mark.parametrize(
    ("groups", "layer", "members"),
    [
        (1, "average", [[0, 1, 2, 3, 4, 5]]),
        (2, "average", [[0, 1, 2], [3, 4, 5]]),
        (2, "first", [[0], [3]]),
        (2, "middle", [[1], [4]]),
        (2, "last", [[2], [5]]),
        (3, -1, [[1], [3], [5]]),
        (1, 4, [[4]]),
        (6, "average", [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_layers_of_a_group(groups: int, layer: str | int, members: list[list[int]]) -> None:
    teacher = tiny.model("bert", layers=6)
    student = converted(teacher, layer=layer, layers=6, num_hidden_groups=groups)
    for group, numbers in zip(student.albert.encoder.albert_layer_groups, members, strict=True):
        theirs = [teacher.bert.encoder.layer[n] for n in numbers]
        (mine,) = group.albert_layers
        for ours, tensors in (
            (mine.attention.key.weight, [each.attention.self.key.weight for each in theirs]),
            (mine.attention.dense.bias, [each.attention.output.dense.bias for each in theirs]),
            (mine.ffn_output.weight, [each.output.dense.weight for each in theirs]),
            (mine.full_layer_layer_norm.weight, [each.output.LayerNorm.weight for each in theirs]),
        ):
            torch.testing.assert_close(ours, sum(tensors) / len(tensors))


def test_a_teacher_with_shared_layers() -> None:
    teacher = tiny.model("bert", layers=4)
    share(teacher, attention=1)
    student = converted(teacher, num_hidden_groups=4)
    torch.testing.assert_close(logits(student), logits(teacher), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("teacher_layers", "groups", "layer", "members"), [(6, 3, "last", (1, 3, 5)), (2, 2, "first", (0, 1))]
)
def test_another_depth(teacher_layers: int, groups: int, layer: str, members: tuple[int, ...]) -> None:
    """A shallower student takes one of neighbouring layers; a deeper one repeats them."""
    teacher = tiny.model("bert", layers=teacher_layers)
    student = converted(teacher, layer=layer, layers=groups if teacher_layers > 4 else 4, num_hidden_groups=groups)
    for group, n in zip(student.albert.encoder.albert_layer_groups, members, strict=True):
        assert torch.equal(group.albert_layers[0].ffn.weight, teacher.bert.encoder.layer[n].intermediate.dense.weight)


@pytest.mark.parametrize("head", [AutoModel, AutoModelForMaskedLM])
def test_another_head_is_unchanged(head: Any) -> None:
    student, untouched = albert(head=head, num_hidden_groups=2), albert(head=head, num_hidden_groups=2)
    teacher = tiny.model("bert", layers=4, head=head)
    from_bert(student, teacher)
    ours, drawn = student.state_dict(), untouched.state_dict()
    changed = {name for name in ours if not torch.equal(ours[name], drawn[name])}
    table = "embeddings.word_embeddings.weight"
    assert any(name.endswith(table) for name in changed)
    assert {name for name in changed if name.startswith("predictions")} <= {"predictions.decoder.weight"}, "tied"


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 2}, "the student's heads is 2, the teacher's 4"),
        ({"hidden": 16}, "leave student.hidden out"),
        ({"intermediate_size": 32}, "the student's ffn is 32"),
        ({"vocab_size": 99}, "the student's vocabulary is 99"),
        ({"inner_group_num": 2}, "inner_group_num is 2"),
        ({"embedding_size": 1}, "an embedding of width 1"),
        ({"layers": 8, "num_hidden_groups": 8}, "8 groups over 8 layers leave some without any of the teacher's 4"),
        ({"layer": "avarage"}, r"no layer 'avarage'\. Did you mean 'average'\?"),
        ({"layer": 4}, "layer 4: a group replaces 4 of the teacher's layers"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StudentError, match=message):
        converted(tiny.model("bert", layers=4), **change)


def test_other_families() -> None:
    with pytest.raises(StudentError, match=r"makes an albert of bert, distilbert, .*, not bert of bert"):
        from_bert(tiny.model("bert"), tiny.model("bert"))
    with pytest.raises(StudentError, match="not albert of deberta-v2"):
        from_bert(albert(), tiny.model("deberta-v2"))
