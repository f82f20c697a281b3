"""Signals equal what the model computes, for every family, and reading them changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    T5Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from compress import families
from compress.errors import ObjectiveError
from compress.models import signals
from compress.models.signals import (
    ATTENTION,
    SIGNAL_NAMES,
    LayerAttention,
    Signals,
    _tap,
    has_unseen_tokens,
    open_attention,
    read,
)
from compress.slicing.shape import Shape
from tests import tiny

ALL = frozenset(SIGNAL_NAMES)
READABLE = [family for family in tiny.FAMILIES if family != "xlnet"]
DISENTANGLED = ["deberta", "deberta-v2"]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def opened(family: str, **changes: Any) -> Any:
    model = tiny.model(family, **changes)
    open_attention(model)
    return model


def probabilities(scores_BHLL: Tensor, mask_BL: Tensor, *, looks_back: bool = False) -> Tensor:
    seen = mask_BL[:, None, None, :].expand_as(scores_BHLL)
    return scores_BHLL.masked_fill((seen.tril() if looks_back else seen) == 0, -torch.inf).softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("family", READABLE)
def test_signals_equal_eager_attention(family: str) -> None:
    batch = tiny.batch()
    shown = read(opened(family), batch, ALL)
    assert shown.logits is not None
    torch.testing.assert_close(shown.logits, tiny.model(family)(**batch).logits)
    eager = tiny.model(family, eager=True)(**batch, output_attentions=True, output_hidden_states=True)
    real_BL = batch["attention_mask"].bool()
    for scores, expected in zip(shown.scores, eager.attentions, strict=True):
        difference = probabilities(scores, shown.mask_BL, looks_back=families.find(family).looks_back) - expected
        assert difference.masked_fill(~real_BL[:, None, :, None], 0).abs().max() < 1e-6
        assert expected.std() > 0.01
    for mine, expected in zip((shown.embeddings, *shown.layers), eager.hidden_states, strict=True):
        torch.testing.assert_close(mine[real_BL], expected[real_BL], rtol=1e-4, atol=1e-5)
    size = 4 if family == "mobilebert" else 8
    for layer in shown.attention:
        assert layer.query_BHLK.shape == layer.key_BHLK.shape == layer.value_BHLK.shape == (3, 4, 7, size)
    if family not in DISENTANGLED:
        torch.testing.assert_close(shown.scores[0], shown.queries[0] @ shown.keys[0].mT / size**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [3, 16, 21])
def test_explicit_attention_equals_sdpa(tokens: int, dtype: torch.dtype) -> None:
    """Compare outputs, and gradients of outputs and scores together."""
    torch.manual_seed(0)
    seen_BLL = torch.rand(2, 1, tokens, tokens) < 0.7
    seen_BLL[..., 0] = True
    found = []
    inputs = [torch.randn(2, tokens, 4, 8, dtype=dtype).transpose(1, 2) for _ in "qkv"]
    for attend in (_tap, sdpa_attention_forward):
        query, key, value = (each.clone().requires_grad_() for each in inputs)
        for mask in (seen_BLL, None):
            tap: list[LayerAttention] = []
            more = {"tap": tap} if attend is _tap else {}
            out, _ = attend(nn.Module(), query, key, value, mask, scaling=8**-0.5, is_causal=False, **more)
            scores = (
                (query * 8**-0.5) @ key.mT
                if attend is not _tap
                else Signals(torch.ones(2), attention=tuple(tap)).scores[0]
            )
            found += [out, *torch.autograd.grad(out.pow(2).sum() + scores.pow(2).sum(), (query, key, value))]
            if attend is _tap:
                assert tap[0].scores_BHLL is not None, "it is the one written out"
    half = len(found) // 2
    close = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    for mine, expected in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(mine, expected, **close)


def test_attention_dropout() -> None:
    """With equal weights and values of 1, an output counts how many of its 16 weights were kept."""
    query = torch.zeros(64, 2, 16, 8)
    torch.manual_seed(0)
    out, _ = _tap(nn.Module(), query, query, torch.ones(64, 2, 16, 8), None, is_causal=False, dropout=0.25)
    kept = out[..., 0] * 0.75 * 16
    torch.testing.assert_close(kept, kept.round(), atol=1e-4, rtol=0)
    assert float(kept.mean()) == pytest.approx(12, abs=0.2)
    assert float(kept.var()) == pytest.approx(16 * 0.25 * 0.75, rel=0.15)


@torch.no_grad()
@pytest.mark.parametrize("untold", [{"s_aux": torch.zeros(2)}, {"attention_mask": torch.zeros(3, 2, 16, 16)}])
def test_what_the_formula_does_not_cover_is_left_to_sdpa_in_training(
    untold: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that is not known, or a mask for each head."""
    monkeypatch.setattr(signals, "sdpa_attention_forward", lambda *_, **given: given["dropout"])
    query = torch.randn(3, 2, 16, 8)
    given: dict[str, Any] = {"attention_mask": None, "is_causal": False, "dropout": 0.1, **untold}
    assert _tap(nn.Module(), query, query, query, **given) == 0.1
    assert isinstance(_tap(nn.Module(), query, query, query, None, is_causal=False, dropout=0.1), tuple)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_rotary_positions_and_grouped_heads_of_decoders(family: str) -> None:
    """Two query heads share each key and value head; Qwen3 normalises them, and has heads 12 wide."""
    model, batch = opened(family, num_key_value_heads=2), tiny.batch((7, 7))
    shown, attention = read(model, batch, ALL), model.model.layers[0].self_attn
    entered = model.model.layers[0].input_layernorm(shown.embeddings)
    query, key, value = (
        getattr(attention, f"{side}_proj")(entered).view(2, 7, -1, attention.head_dim).transpose(1, 2)
        for side in ("q", "k", "v")
    )
    if family == "qwen3":
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key = apply_rotary_pos_emb(query, key, *model.model.rotary_emb(entered, torch.arange(7)[None]))
    for mine, expected in ((shown.keys[0], key), (shown.values[0], value)):
        assert torch.equal(mine, expected[:, [0, 0, 1, 1]])
    torch.testing.assert_close(shown.queries[0], query)
    scores = torch.stack([query[:, head] @ key[:, head // 2].mT / attention.head_dim**0.5 for head in range(4)], 1)
    torch.testing.assert_close(shown.scores[0], scores)


@torch.no_grad()
@pytest.mark.parametrize("pos_att_type", [["c2p"], ["p2c"], ["c2p", "p2c"]])
@pytest.mark.parametrize("share_att_key", [True, False])
def test_position_terms_of_deberta(share_att_key: bool, pos_att_type: list[str]) -> None:
    changes = {"share_att_key": share_att_key, "pos_att_type": pos_att_type}
    batch = tiny.batch()
    shown = read(opened("deberta-v2", **changes), batch, ALL)
    eager = tiny.model("deberta-v2", **changes)(**batch, output_attentions=True)
    for scores, expected in zip(shown.scores, eager.attentions, strict=True):
        difference = probabilities(scores, shown.mask_BL) - expected
        assert (difference * batch["attention_mask"][:, None, :, None]).abs().max() < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("head", [AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification])
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert"])
def test_layers_under_every_head(family: str, head: Any) -> None:
    batch = tiny.batch()
    model = opened(family, head=head)
    shown = read(model, batch, ALL - {"logits", "pair"})
    tap: dict[str, Any] = {} if family == "deberta-v2" else {"tap": []}  # attention that is shown is written out
    expected = getattr(model, "base_model", model)(**batch, **tap, output_hidden_states=True).hidden_states
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(shown.layers, expected[1:], strict=True))
    assert len(shown.scores) == 2


@torch.no_grad()
def test_only_requested_signals_are_read() -> None:
    model, batch, passes = opened("bert"), tiny.batch(), list[None]()
    model.classifier.register_forward_hook(lambda *_: passes.append(None))
    shown = read(model, batch, ALL - {"logits", "pair"})
    assert (shown.logits, passes) == (None, []), "the head did not run"
    shown = read(model, batch, frozenset({"logits"}))
    assert shown.logits is not None
    assert (len(passes), shown.hidden, shown.attention) == (1, (), ())
    assert read(model, batch, frozenset({"embeddings"})).attention == ()
    assert read(model, batch, frozenset({"keys"})).hidden == ()


@torch.no_grad()
def test_unknown_inputs_and_labels_are_dropped() -> None:
    batch = tiny.batch()
    extra = {"token_type_ids": torch.zeros_like(batch["input_ids"]), "labels": torch.full((3,), 99), "length": 7}
    model = tiny.model("distilbert")
    expected = model(**batch).logits
    shown = read(model, batch | extra, frozenset({"logits"}))
    assert shown.logits is not None
    assert torch.equal(shown.logits, expected)


@torch.no_grad()
def test_without_a_mask_every_token_is_real() -> None:
    batch = tiny.batch((5, 5))
    ids = {"input_ids": batch["input_ids"]}
    model = opened("bert")
    assert torch.equal(read(model, ids, ALL).mask_BL, torch.ones(2, 5).long())
    torch.testing.assert_close(read(model, ids, ALL).logits, read(model, batch, ALL).logits)


# Other attention than BERT's


def encoder_decoder(kind: str, **changes: Any) -> Any:
    """Make a small T5 or BART, two layers in the encoder and three in the decoder, with wide biases of positions."""
    torch.manual_seed(0)
    common = {"vocab_size": 60, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "d_model": 32}
    t5 = {"num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 8, "d_ff": 64, "initializer_factor": 2.0}
    bart = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = T5Config(**common, **t5) if kind == "t5" else BartConfig(**common, **bart, init_std=0.3)
    return AutoModelForSeq2SeqLM.from_config(config, **changes).eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_attention_of_an_encoder_decoder_is_the_encoders(kind: str) -> None:
    model = encoder_decoder(kind)
    open_attention(model)
    batch = tiny.batch() | {"decoder_input_ids": tiny.batch((4, 4, 4))["input_ids"]}
    shown = read(model, batch, ALL - {"pair"})
    assert (len(shown.scores), len(shown.layers), len(shown.encoder_layers)) == (2, 3, 2)
    eager = encoder_decoder(kind, attn_implementation="eager")(**batch, output_attentions=True)
    for scores, expected in zip(shown.scores, eager.encoder_attentions, strict=True):
        difference = probabilities(scores, shown.mask_BL) - expected
        assert (difference * batch["attention_mask"][:, None, :, None]).abs().max() < 1e-5
    shape = Shape.from_config(model.config)
    assert [shape.stack(signal) for signal in ("scores", "encoder_layers", "layers")] == [2, 2, 3]


def test_the_bias_of_t5s_positions_learns_from_scores() -> None:
    model = encoder_decoder("t5")
    open_attention(model)
    read(model.encoder, tiny.batch(), frozenset({"scores"})).scores[1].square().mean().backward()
    gradient = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
    assert gradient is not None
    assert gradient.any()


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(7, 7), (7, 5, 1)])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_causal_model_says_which_tokens_each_token_sees(family: str, lengths: tuple[int, ...]) -> None:
    """Mistral's window here is four tokens."""
    model, batch = opened(family), tiny.batch(lengths)
    expected = torch.ones(7, 7).tril().bool() & (torch.ones(7, 7).triu(-3 if family == "mistral" else -7).bool())
    real_BL = batch["attention_mask"].bool()
    for layer in read(model, batch, ATTENTION).attention:
        assert layer.seen_BLL is not None
        assert torch.equal(layer.seen_BLL & real_BL[:, :, None], expected & real_BL[:, :, None] & real_BL[:, None, :])
    assert has_unseen_tokens(model)


@torch.no_grad()
def test_masks_of_padding_are_not_kept() -> None:
    for family in READABLE:
        model, batch = opened(family), tiny.batch((7, 5))
        unseen = [layer.seen_BLL is not None for layer in read(model, batch, ATTENTION).attention]
        assert any(unseen) == (has_unseen_tokens(model) and family != "modernbert"), "a window longer than the texts"


def test_a_setting_of_attention_that_is_not_known_is_refused() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ObjectiveError, match=r"Module computes its attention with s_aux.*leave attention losses out"):
        _tap(nn.Module(), query, query, query, None, tap=[], is_causal=False, s_aux=torch.zeros(2), use_cache=True)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("family", DISENTANGLED)
def test_deberta_hooks_are_removed(family: str) -> None:
    model = opened(family)
    read(model, tiny.batch(), ALL)
    assert hooks(model) == 0
    layers = model.base_model.encoder.layer
    broken = layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read(model, tiny.batch(), ALL)
    broken.remove()
    assert hooks(model) == 0
    assert len(read(model, tiny.batch(), ALL).scores) == 2


def test_models_share_nothing() -> None:
    """Reading two models in turn changes no global state."""
    teacher, student, plain = opened("bert", layers=3), opened("bert"), tiny.model("bert")
    shown = [read(model, tiny.batch(), ALL) for model in (teacher, student, teacher)]
    assert [len(each.scores) for each in shown] == [3, 2, 3]
    assert plain.config._attn_implementation == "sdpa"


# Gradients

GRADIENT_FAMILIES = ["bert", "distilbert", "mobilebert", "llama", *DISENTANGLED]


@pytest.mark.parametrize("family", GRADIENT_FAMILIES)
@pytest.mark.parametrize("signal", sorted(ATTENTION))
def test_gradients_flow_through_attention(family: str, signal: str) -> None:
    model = opened(family)
    last = getattr(read(model, tiny.batch(), ATTENTION), signal)[-1]
    last.square().sum().backward()
    embedding = model.base_model.get_input_embeddings().weight.grad
    assert embedding is not None
    assert embedding.isfinite().all()
    assert embedding.any()


def gradients(model: Any) -> dict[str, Tensor]:
    shown = read(model, tiny.batch(), ALL)
    assert shown.logits is not None
    loss = shown.logits.square().sum() + sum(each.square().mean() for each in (*shown.scores, *shown.values))
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def in_training(family: str) -> Any:
    return tiny.model(family, **NO_DROPOUT).train()


@pytest.mark.parametrize("family", ["bert", "roberta", *DISENTANGLED])
def test_non_reentrant_checkpointing_is_exact(family: str) -> None:
    plain, checkpointed = in_training(family), in_training(family)
    checkpointed.activation_checkpointing_enable({"use_reentrant": False})
    for model in (plain, checkpointed):
        open_attention(model)
    expected, found = gradients(plain), gradients(checkpointed)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("family", ["bert", *DISENTANGLED])
def test_reentrant_checkpointing_is_refused(family: str) -> None:
    model = in_training(family)
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ObjectiveError, match=r"reentrant gradient checkpointing .*'use_reentrant': False"):
        gradients(model)


# Errors


@pytest.mark.parametrize(
    ("family", "opens", "message"),
    [
        ("xlnet", True, r"XLNetForSequenceClassification has recorded no attention: .* leave attention"),
        ("bert", False, r"call signals\.open_attention\(model\) first"),
    ],
)
def test_models_without_readable_attention(family: str, opens: bool, message: str) -> None:
    model = opened(family) if opens else tiny.model(family)
    with pytest.raises(ObjectiveError, match=message):
        read(model, tiny.batch(), frozenset({"scores"}))
    assert len(read(model, tiny.batch(), frozenset({"layers"})).layers) == 2
