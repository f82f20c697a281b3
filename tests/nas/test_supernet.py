"""A subnet is the model that is extracted at its shape: in what it computes, shows, and teaches the whole."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification

from compress.config.term import LAYERED
from compress.data.collate import Collate
from compress.data.task import Task
from compress.errors import PruneError, StudentError
from compress.evaluation import metrics
from compress.evaluation.evaluator import EvaluationBatches, Evaluator
from compress.models.signals import ATTENTION, Signals, has_lm_head, open_attention, read
from compress.nas import supernet as module
from compress.nas.supernet import Supernet
from compress.slicing.cut import cut, reorder_units
from compress.slicing.plan import SlicePlan, parameters_of
from compress.slicing.select import choose, magnitude
from compress.slicing.sizes import Sizes
from compress.training.embedding_rows import only_tokens_in_use
from tests import learning, tiny
from tests.slicing.families import FAMILIES, axes, model, ways

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HIDDEN = frozenset({"logits", "embeddings", "layers"})
LOGITS = frozenset({"logits"})


def tensors(shown: Signals, wants: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(wants):
        found = getattr(shown, name)
        for n, each in enumerate(found if name in LAYERED else (found,)):
            yield f"{name} {n}", each


def assert_shows_the_same(one: Signals, other: Signals, wants: frozenset[str]) -> None:
    mine, theirs = dict(tensors(one, wants)), dict(tensors(other, wants))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("family", "axis"), ways())
def test_a_subnet_is_the_extracted_model(family: str, axis: str) -> None:
    whole = reorder_units(model(family), magnitude(model(family)))
    net = Supernet(whole)
    sizes = Sizes.from_request(whole.config, **axes(family)[axis])
    small = net.extract(sizes)
    assert Sizes.from_config(small.config) == sizes
    batch = tiny.batch()
    assert_shows_the_same(net.signals(batch, HIDDEN, sizes), read(small, batch, HIDDEN), HIDDEN)


def fewer_heads(family: str) -> dict[str, float]:
    """A smaller stream, of heads of the same size, in the groups that share keys and values."""
    if family == "mobilebert":
        return {"heads": 2, "bottleneck": 0.5}
    return {"heads": 2 if family in tiny.LIKE_LLAMA else 3, "hidden": 24}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_a_subnet_can_be_read(family: str) -> None:
    """Of the same size of heads: larger ones have rows that are drawn anew."""
    whole, wants = model(family), frozenset(ATTENTION)
    axes = fewer_heads(family)
    sizes = Sizes.from_request(whole.config, **axes, layers=2)
    net, small = Supernet(whole), Supernet(whole).extract(sizes)
    open_attention(whole)
    open_attention(small)
    assert_shows_the_same(net.signals(tiny.batch(), wants, sizes), read(small, tiny.batch(), wants), wants)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_subnet_is_the_whole(family: str) -> None:
    whole = model(family)
    net = Supernet(whole)
    everything = net.plan.sizes
    assert_shows_the_same(net.signals(tiny.batch(), HIDDEN, everything), read(whole, tiny.batch(), HIDDEN), HIDDEN)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_subnet_are_the_extracted_models_in_their_places(family: str) -> None:
    """And nothing elsewhere. Where each weight comes from is told by cutting the whole's numbers instead."""
    whole = model(family)
    net = Supernet(whole)
    axes = fewer_heads(family)
    sizes = Sizes.from_request(whole.config, **axes, ffn=0.5, **({} if family == "albert" else {"layers": 2}))
    small = net.extract(sizes)
    batch, draw = tiny.batch(), torch.Generator().manual_seed(0)
    towards = torch.randn(read(small, batch, LOGITS).logits.shape, generator=draw)  # type: ignore[union-attr]
    for shown in (net.signals(batch, LOGITS, sizes), read(small, batch, LOGITS)):
        assert shown.logits is not None
        (shown.logits * towards).sum().backward()

    numbers = {name: torch.arange(each.numel()).view(each.shape) for name, each in parameters_of(whole).items()}
    sources = _sources(net.plan, whole, numbers, choose(net.plan, None, sizes))
    expected = {id(each): torch.zeros(each.numel()) for each in parameters_of(whole).values()}
    for name, parameter in small.named_parameters():
        if parameter.grad is not None:
            source, places = sources[name]
            expected[id(source)].index_add_(0, places.flatten(), parameter.grad.flatten())
    for name, parameter in whole.named_parameters():
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        scattered = expected[id(parameter)].view(parameter.shape)
        torch.testing.assert_close(got, scattered, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
    assert any(each.grad is not None and bool((each.grad == 0).any()) for each in whole.parameters()), "not everything"


def _sources(plan: SlicePlan, whole: Any, numbers: dict[str, Tensor], kept: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """For each weight of the smaller model, the whole's weight it comes from, and where in it each number stands."""
    found = {}
    for name, parameter in parameters_of(whole).items():
        for mine, places in cut(plan, {name: numbers[name]}, kept).items():
            found[mine] = (parameter, places)
    return found


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2", "albert"])
def test_prefixes_nest(family: str) -> None:
    """A smaller subnet's weights are the first of a larger one's."""
    whole = model(family)
    net, weights = Supernet(whole), parameters_of(whole)
    large = Sizes.from_request(whole.config, heads=3, hidden=24, ffn=48)
    small = Sizes.from_request(whole.config, heads=2, hidden=16, ffn=16)
    outer, inner = (cut(net.plan, weights, net.kept(sizes)) for sizes in (large, small))
    for name, tensor in inner.items():
        held = set(outer[name].flatten().tolist())
        assert held.issuperset(tensor.flatten().tolist()), name


@pytest.mark.parametrize("head", [AutoModelForTokenClassification, AutoModelForMaskedLM])
def test_heads_on_tokens_and_tied_ones(head: Any) -> None:
    whole = tiny.model("bert", layers=3, head=head)
    net, batch = Supernet(whole), tiny.batch()
    sizes = Sizes.from_request(whole.config, hidden=0.5, ffn=0.5)
    small = net.extract(sizes)
    assert_shows_the_same(net.signals(batch, HIDDEN, sizes), read(small, batch, HIDDEN), HIDDEN)
    net.signals(batch, LOGITS, sizes).logits.sum().backward()  # type: ignore[union-attr]
    if has_lm_head(whole):
        table = whole.get_input_embeddings().weight
        assert bool((table.grad[:, :16] != 0).all(0).any()), "a tied table learns as input and as output"
        at_BL = batch["attention_mask"].bool()
        some, all_of_them = (net.signals(batch, LOGITS, sizes, at_BL=at).logits for at in (at_BL, None))
        torch.testing.assert_close(some, all_of_them[at_BL], **CLOSE)  # type: ignore[index]


def test_dropout_is_the_wholes() -> None:
    whole = tiny.model("bert", hidden_dropout_prob=0.3).train()
    net, batch, sizes = Supernet(whole), tiny.batch(), Sizes.from_config(whole.config)
    shown = []
    for run in (lambda: net.signals(batch, LOGITS, sizes), lambda: read(whole, batch, LOGITS)):
        torch.manual_seed(3)
        shown.append(run().logits)
    assert torch.equal(*shown)
    assert not torch.equal(net.signals(batch, LOGITS, sizes).logits, shown[0])  # type: ignore[arg-type]
    whole.eval()
    once, again = (net.signals(batch, LOGITS, sizes).logits for _ in range(2))
    assert torch.equal(once, again)  # type: ignore[arg-type]


def test_autocast_equals_the_extracted_model() -> None:
    whole = tiny.model("bert")
    net, sizes = Supernet(whole), Sizes.from_request(whole.config, hidden=0.5, ffn=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        shown, expected = net.signals(tiny.batch(), LOGITS, sizes), read(net.extract(sizes), tiny.batch(), LOGITS)
    assert torch.equal(shown.logits, expected.logits)  # type: ignore[arg-type]


def test_layers_by_rule() -> None:
    whole = tiny.model("bert", layers=6)
    half, batch = Sizes.from_request(whole.config, layers=3), tiny.batch()
    even, uniform = Supernet(whole), Supernet(whole, depth="uniform")
    assert (even.layers(half), uniform.layers(half)) == ((0, 2, 5), (1, 3, 5))
    one, other = (net.signals(batch, LOGITS, half).logits for net in (even, uniform))
    assert not torch.equal(one, other)  # type: ignore[arg-type]


def test_impossible_subnets_are_refused() -> None:
    with pytest.raises(PruneError, match="no slice plan"):
        Supernet(tiny.model("xlnet"))
    whole = tiny.model("bert")
    with pytest.raises(PruneError, match="not within"):
        Supernet(whole).extract(Sizes.from_config(tiny.config("bert", hidden=64)))
    with pytest.raises((PruneError, StudentError)):
        Supernet(whole, depth="even").extract(Sizes.from_config(tiny.config("bert", layers=3)))


def test_few_skeletons_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SKELETONS", 2)
    whole = tiny.model("bert")
    net, batch = Supernet(whole), tiny.batch()
    shapes = [Sizes.from_request(whole.config, ffn=count) for count in (8, 16, 24)]
    first = [net.signals(batch, LOGITS, sizes).logits for sizes in shapes]
    assert [sizes.ffn for sizes, *_ in net._skeletons] == [16, 24]
    again = [net.signals(batch, LOGITS, sizes).logits for sizes in shapes]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))  # type: ignore[arg-type]


# Only the tokens in use


def test_tokens_in_use_change_neither_answers_nor_gradients() -> None:
    rows = learning.rows(vocabulary=6)
    whole = tiny.model("bert").train()
    for each in whole.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
    whole.config.hidden_dropout_prob = whole.config.attention_probs_dropout_prob = 0.0
    net, batch = Supernet(whole), learning.collate()([rows[n] for n in range(6)])
    sizes, table = Sizes.from_request(whole.config, hidden=0.5), whole.get_input_embeddings()
    expected = net.signals(batch, LOGITS, sizes).logits
    expected.square().sum().backward()  # type: ignore[union-attr]
    dense = table.weight.grad.clone()
    with only_tokens_in_use(whole, rows):
        in_use = whole.get_input_embeddings()
        assert len(in_use.weight) < len(table.weight)
        shown = net.signals(batch, LOGITS, sizes).logits
        shown.square().sum().backward()  # type: ignore[union-attr]
        torch.testing.assert_close(in_use.weight.grad, dense[in_use.used], **CLOSE)
        with torch.no_grad():
            in_use.weight.mul_(2)
        extracted = net.extract(sizes)
        assert len(extracted.get_input_embeddings().weight) == len(table.weight)
        assert torch.equal(extracted.get_input_embeddings().weight[in_use.used], in_use.weight[:, :16])
        assert whole.get_input_embeddings() is in_use, "training goes on"
    torch.testing.assert_close(shown, expected, **CLOSE)


def test_padding_is_not_learned() -> None:
    whole = tiny.model("bert")
    net = Supernet(whole)
    batch = tiny.batch() | {"attention_mask": torch.ones(3, 7, dtype=torch.long)}
    net.signals(batch, LOGITS, net.plan.sizes).logits.sum().backward()  # type: ignore[union-attr]
    grad = whole.get_input_embeddings().weight.grad
    assert not grad[0].any()
    assert grad[batch["input_ids"][0, 0]].any()


# Scores


def exam(count: int = 30) -> Evaluator:
    rows = learning.rows(count)
    split = Dataset.from_dict({"label": rows["labels"][:]})
    return Evaluator(Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy"), split, rows)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_score_is_the_extracted_models(bf16: bool) -> None:
    whole = tiny.model("bert", layers=3).train()
    net, asked = Supernet(whole), exam()
    sizes = Sizes.from_request(whole.config, hidden=0.5, layers=2)
    collate = Collate(tiny.tokenizer())
    sheets = EvaluationBatches.from_evaluator(asked, collate, batch=7)
    small = net.extract(sizes)
    expected = metrics.logits(small, asked.rows, collate, batch=7, bf16=bf16)
    found = sheets.answers(net.logits(sizes, sheets, bf16=bf16))
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
    assert net.score(sizes, sheets, bf16=bf16) == asked.scores(expected)["accuracy"]
    assert whole.training, "and goes on training"
    assert all(each.grad is None for each in whole.parameters())


def test_fewer_examples_for_a_first_look() -> None:
    whole = tiny.model("bert")
    sheets = EvaluationBatches.from_evaluator(exam().subsample(8), Collate(tiny.tokenizer()))
    assert len(Supernet(whole).logits(Sizes.from_config(whole.config), sheets)[0]) == 8


def test_answers_per_token_are_those_of_real_tokens_in_order() -> None:
    whole = tiny.model("bert", head=AutoModelForTokenClassification)
    asked, collate = exam(), Collate(tiny.tokenizer())
    sheets = EvaluationBatches.from_evaluator(asked, collate, batch=7)
    found = sheets.answers(Supernet(whole).logits(Sizes.from_config(whole.config), sheets))
    expected = metrics.logits(whole, asked.rows, collate, batch=7)
    assert found.shape == (sum(asked.rows["length"][:]), 3)
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), **CLOSE)


def test_the_whole_vocabulary_is_known_while_only_some_of_it_is_trained() -> None:
    whole = tiny.model("bert").train()
    net, sheets = Supernet(whole), EvaluationBatches.from_evaluator(exam(), Collate(tiny.tokenizer()))
    sizes = Sizes.from_request(whole.config, ffn=0.5)
    before = net.logits(sizes, sheets)
    with only_tokens_in_use(whole, learning.rows(vocabulary=6)):
        during = net.logits(sizes, sheets)
    assert all(torch.equal(one, other) for one, other in zip(before, during, strict=True))


def test_the_wholes_modules_are_unchanged() -> None:
    """Nothing of the model is replaced: a plain call gives what it gave."""
    whole = model("bert")
    before = functional_call(whole, parameters_of(whole), kwargs=tiny.batch()).logits
    net = Supernet(whole)
    net.signals(tiny.batch(), LOGITS, Sizes.from_request(whole.config, hidden=0.5))
    assert torch.equal(whole(**tiny.batch()).logits, before)
