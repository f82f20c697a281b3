"""Yang et al. 2019: who may see whom, checked on transformers' XLNet."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import XLNetConfig, XLNetLMHeadModel

from compress.config.recipe import Recipe
from compress.config.stages import StudentSpec
from compress.data.constants import IGNORE_INDEX
from compress.models.student import build, config_for
from compress.papers.bert import masked_lm
from compress.papers.xlnet import permute
from tests import tiny
from tests.papers import rows
from tests.papers.rows import CLS, FIRST, SEP, words


def batch(*lengths: int) -> dict[str, Tensor]:
    """Rows of these many text tokens, special tokens last, as XLNet's tokenizer frames."""
    return rows.batch(*[[*range(FIRST, FIRST + length), SEP, CLS] for length in lengths])


def targets(permuted: dict[str, Tensor]) -> Tensor:
    """(B, L) true at the targets."""
    return permuted["target_mapping"].sum(1).bool()


def xlnet() -> Any:
    torch.manual_seed(0)
    shape = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "vocab_size": 1000}
    return XLNetLMHeadModel(XLNetConfig(**shape, initializer_range=0.5, dropout=0.0)).eval()


def test_the_recipe_trains_a_base_model_with_the_numbers_of_bert() -> None:
    """Sec. 3.1, 3.4: 256 million rows; Table 7's numbers, which would be 4,096 million, are the large one's."""
    recipe = Recipe.load("xlnet")
    pretrain, bert = recipe.training[0], Recipe.load("bert").training[0]
    assert (recipe.student.layers, recipe.student.hidden) == (12, 768)
    assert (pretrain.steps, pretrain.batch, pretrain.lr, pretrain.max_length) == (1_000_000, bert.batch, bert.lr, 512)


def test_each_target_has_its_row_and_its_token_as_label() -> None:
    given = batch(60, 25, 1)
    for _ in range(20):
        permuted = permute(given, words())
        mapping_BPL, labels_BP = permuted["target_mapping"], permuted["labels"]
        P = int(targets(permuted).sum(-1).max())
        assert mapping_BPL.shape == (3, P, 62)
        assert labels_BP.shape == (3, P)
        assert permuted["perm_mask"].shape == (3, 62, 62)
        assert {each.dtype for each in (mapping_BPL, permuted["perm_mask"])} == {torch.float32}
        assert torch.equal(mapping_BPL.sum(-1) == 1, labels_BP != IGNORE_INDEX)
        assert torch.equal(permuted["input_ids"], given["input_ids"])
        found = (mapping_BPL @ given["input_ids"].float()[:, :, None])[..., 0].long()
        assert torch.equal(found[labels_BP != IGNORE_INDEX], labels_BP[labels_BP != IGNORE_INDEX])
        assert (labels_BP[labels_BP != IGNORE_INDEX] >= FIRST).all()
        assert (labels_BP != IGNORE_INDEX).sum(-1).min() >= 1


def test_a_sixth_of_the_tokens_are_targets_in_spans_of_up_to_five() -> None:
    torch.manual_seed(0)
    chosen_BL = targets(permute(batch(*[600] * 100), words()))[:, :600]
    assert chosen_BL.float().mean().item() == pytest.approx(1 / 6, abs=0.005)
    runs: list[int] = []
    for row in chosen_BL.tolist():
        text = "".join("x" if each else " " for each in row)
        runs += map(len, text.split())
    single = [runs.count(n) / len(runs) for n in range(1, 6)]
    assert min(single) > 0.15 and sum(single) > 0.9  # two spans may touch


def test_context_is_seen_by_all_and_targets_only_by_targets_after_them() -> None:
    permuted = permute(batch(40, 20), words())
    hidden_BLL, target_BL = permuted["perm_mask"].bool(), targets(permuted)
    for hidden_LL, target_L in zip(hidden_BLL, target_BL, strict=True):
        assert not hidden_LL[:, ~target_L].any()
        assert hidden_LL[~target_L][:, target_L].all()
        among = hidden_LL[target_L][:, target_L]
        assert among.diagonal().all()
        n = len(among)
        assert torch.equal(among ^ among.T, ~torch.eye(n, dtype=torch.bool))  # of two, one sees the other
        assert sorted(among.sum(-1).tolist()) == list(range(1, n + 1))  # which is an order


def test_orders_are_drawn_evenly() -> None:
    torch.manual_seed(0)
    given = batch(*[5] * 400)
    permuted = permute(given, words(), context=1, longest=5)
    first = permuted["perm_mask"][:, 0, 4]  # 1: position 0 is before 4, and may not see it
    both = targets(permuted)[:, 0] & targets(permuted)[:, 4]
    assert both.all()
    assert first.mean().item() == pytest.approx(0.5, abs=4 * (0.25 / 400) ** 0.5)


def test_no_target_sees_itself_or_later_ones_and_sees_all_others() -> None:
    """By the gradient of each prediction with respect to the embedding of each token."""
    model, given = xlnet(), batch(24, 17)
    permuted = permute(given, words())
    embedded_BLD = model.transformer.word_embedding(given["input_ids"]).detach().requires_grad_()
    inputs = {name: permuted[name] for name in ("attention_mask", "perm_mask", "target_mapping")}
    logits_BPV = model(inputs_embeds=embedded_BLD, **inputs).logits
    real_BL, hidden_BLL = given["attention_mask"].bool(), permuted["perm_mask"].bool()
    for b in range(2):
        for p in (permuted["labels"][b] != IGNORE_INDEX).nonzero().flatten().tolist():
            at = int(permuted["target_mapping"][b, p].argmax())
            (gradient,) = torch.autograd.grad(logits_BPV[b, p].square().sum(), embedded_BLD, retain_graph=True)
            assert not gradient[1 - b].any()
            reached_L = gradient[b].abs().sum(-1) > 0
            assert torch.equal(reached_L, real_BL[b] & ~hidden_BLL[b, at])
            assert not reached_L[at]


def test_a_tiny_xlnet_learns_by_it() -> None:
    model, given = xlnet().train(), batch(24, 17)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        permuted = permute(given, words())
        inputs = {name: value for name, value in permuted.items() if name != "labels"}
        loss = masked_lm(model(**inputs).logits, permuted["labels"], None)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 0.5 * sum(losses[:5]) / 5


def test_a_student_for_another_familys_vocabulary_sums_up_where_its_rows_have_cls() -> None:
    spec = StudentSpec(family="xlnet", layers=1, hidden=16, heads=2, ffn=24)
    config = config_for(spec, tiny.bert().config)
    assert (config.d_model, config.n_head, config.d_head, config.d_inner) == (16, 2, 8, 24)
    assert config.summary_type == "first"
    model = build(spec, tiny.bert()).eval()
    short = {"input_ids": torch.tensor([[2, 7, 8, 3]]), "attention_mask": torch.ones(1, 4)}
    padded = {name: torch.nn.functional.pad(each, (0, 5)) for name, each in short.items()}
    torch.testing.assert_close(model(**padded).logits, model(**short).logits)


def test_draws_follow_torchs_generator() -> None:
    torch.manual_seed(1)
    first = permute(batch(30), words())
    torch.manual_seed(1)
    again = permute(batch(30), words())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["perm_mask"], permute(batch(30), words())["perm_mask"])
