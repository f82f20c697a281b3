"""Losses over passages give the values of sentence-transformers' own, on the same cross-encoder and texts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.papers import karpukhin, listnet, margin_mse, monobert
from compress.training.objective import answers, preferences
from tests import tiny

library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
losses = library.cross_encoder.losses
TEXTS = {
    "a good film": ["the plot is fun", "this was dull", "never so sad , too"],
    "the actor": ["a great actor", "the story was slow", "and so on"],
}
LABELS = torch.tensor([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0]])
QUERY = torch.tensor([0, 0, 0, 1, 1, 1])
SAME = (QUERY[:, None] == QUERY).long()


@pytest.fixture
def encoder(tmp_path: Path) -> Any:
    """A cross-encoder in eval mode, without dropout."""
    found = library.CrossEncoder(tiny.checkpoint(tmp_path / "model", tiny.bert(1, initializer_range=0.5)))
    return found.eval()


@pytest.fixture
def student_B1(encoder: Any) -> Tensor:
    pairs = [(query, passage) for query, passages in TEXTS.items() for passage in passages]
    with torch.no_grad():
        tokens = tiny.tokenizer()(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
        logits: Tensor = encoder.model(**tokens).logits
    assert logits.shape == (6, 1) and logits.std() > 0.05
    return logits


def test_listnet(encoder: Any, student_B1: Tensor) -> None:
    expected = losses.ListNetLoss(encoder)([list(TEXTS), list(TEXTS.values())], list(LABELS))
    found = listnet.relevance(student_B1, LABELS.view(-1, 1), SAME)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_listnet_of_a_teacher_has_its_gradient(encoder: Any, student_B1: Tensor) -> None:
    """KL is the cross entropy less the teacher's entropy, which the student cannot change."""
    teacher_B1, student_B1 = torch.randn(6, 1, generator=torch.Generator().manual_seed(0)), student_B1.requires_grad_()
    kl, entropy = (listnet.top_one(each, teacher_B1, SAME) for each in (student_B1, torch.zeros(6, 1)))
    uniform = listnet.relevance(torch.zeros(6, 1), teacher_B1, SAME)
    assert (kl - entropy).item() == pytest.approx(
        (listnet.relevance(student_B1, teacher_B1, SAME) - uniform).item(), rel=1e-4
    )
    given = [
        torch.autograd.grad(loss(student_B1, teacher_B1, SAME), student_B1)[0]
        for loss in (listnet.top_one, listnet.relevance)
    ]
    torch.testing.assert_close(*given)


def test_margin_mse(encoder: Any, student_B1: Tensor) -> None:
    """Theirs has one relevant passage, the first, and lists of the teacher's scores."""
    relevant = torch.tensor([[1.0, 0.0, 0.0]]).repeat(2, 1)
    teacher = torch.tensor([[3.0, -1.0, 0.5], [2.0, 1.0, -4.0]])
    passages = list(map(list, zip(*TEXTS.values(), strict=True)))
    with torch.no_grad():
        expected = losses.MarginMSELoss(encoder)([list(TEXTS), *passages], list(teacher))
    found = margin_mse.margins(student_B1, teacher.view(-1, 1), preferences(QUERY, relevant))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_monobert(encoder: Any, student_B1: Tensor) -> None:
    pairs = [(query, passage) for query, passages in TEXTS.items() for passage in passages]
    relevant = (LABELS > 0).float().view(-1)
    with torch.no_grad():
        expected = losses.BinaryCrossEntropyLoss(encoder)(list(map(list, zip(*pairs, strict=True))), relevant)
    found = monobert.relevance(student_B1, LABELS.view(-1, 1), None)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_in_batch_negatives() -> None:
    """Theirs takes queries, relevant passages and irrelevant ones as three tables; ours is a batch of three groups."""

    class Vectors(nn.Module):
        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return features

        def get_embedding_dimension(self) -> int:
            return 6

    vectors = torch.randn(3, 3, 6, generator=torch.Generator().manual_seed(0))
    bi_encoder: Any = Vectors()
    theirs = library.sentence_transformer.losses.MultipleNegativesRankingLoss(bi_encoder, scale=10.0)
    expected = theirs([{"sentence_embedding": vectors[:, at]} for at in range(3)], None)
    group, text = torch.arange(3).repeat_interleave(3), torch.arange(9)
    relevance = torch.tensor([0.0, 1.0, 0.0]).repeat(3)
    found = karpukhin.in_batch(vectors.view(9, 6), relevance, answers(group, text, 3 * group), temperature=0.1)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
