"""DeBERTaV3: replaced tokens, and what generator and discriminator share."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor
from torch.nn.functional import gelu, layer_norm
from transformers import AutoModel, DebertaV2Model

from compress.data.constants import IGNORE_INDEX
from compress.errors import ObjectiveError, StudentError
from compress.papers import bert, deberta, deberta_v3, electra
from compress.papers.bert import masked_lm
from tests import learning, tiny
from tests.papers.test_deberta import WORDS, corrupted, has_gradient


def encoder(seed: int = 0, **changes: Any) -> Any:
    return tiny.model("deberta-v2", seed=seed, head=AutoModel, layers=4, **changes)


def replaced(student: Any, **options: Any) -> deberta_v3.ReplacedTokenDetection:
    return deberta_v3.ReplacedTokenDetection(student, None, None, **options).eval()


def generator(step: deberta_v3.ReplacedTokenDetection) -> Any:
    return step.generator.model if isinstance(step.generator, deberta.MaskDecoder) else step.generator


def trained(step: Any, batch: dict[str, Tensor], steps: int = 3) -> None:
    optimiser = torch.optim.AdamW([each for each in step.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        step(**batch)["loss"].backward()
        optimiser.step()


def detection(step: deberta_v3.ReplacedTokenDetection, batch: dict[str, Tensor]) -> Tensor:
    """L_RTD alone, on a text where every masked token became token 9."""
    ids = torch.where(batch["labels"] != IGNORE_INDEX, 9, batch["input_ids"])
    labels = ((batch["labels"] != IGNORE_INDEX) & (batch["labels"] != 9)).long()
    parts = step.discriminate(input_ids=ids, attention_mask=batch["attention_mask"], labels=labels)
    loss: Tensor = parts["loss"]
    return loss


def test_the_generator_has_half_the_layers_and_the_student_is_what_it_was() -> None:
    student, batch = encoder(), tiny.batch()
    before = student(**batch).last_hidden_state.detach()
    step = replaced(student)
    assert generator(step).config.num_hidden_layers == 2
    assert generator(step).config.hidden_size == student.config.hidden_size
    assert student.config.num_hidden_layers == 4
    torch.testing.assert_close(student(**batch).last_hidden_state, before)
    assert torch.equal(generator(step).get_input_embeddings().weight, student.get_input_embeddings().weight)


def test_the_loss_by_hand() -> None:
    student, batch = encoder(), corrupted()
    step = replaced(student)
    logits = step.generator(batch)
    torch.manual_seed(7)
    ids, changed = electra.replace(batch["input_ids"], batch["labels"], logits)
    mask, head = batch["attention_mask"], step.discriminate.student
    hidden = student(input_ids=ids, attention_mask=mask).last_hidden_state
    hidden = layer_norm(hidden + hidden[:, :1], (32,), head.norm.weight, head.norm.bias, head.norm.eps)
    found = gelu(hidden @ head.dense.weight.T + head.dense.bias) @ head.out.weight[0] + head.out.bias
    expected = masked_lm(logits, batch["labels"][batch["labels"] != IGNORE_INDEX], None)
    expected = expected + 50 * electra.replaced_tokens(found, changed, mask)
    torch.manual_seed(7)
    torch.testing.assert_close(step(**batch)["loss"], expected)


@pytest.mark.parametrize("positions", [False, True])
def test_gdes_keeps_the_two_gradients_apart(positions: bool) -> None:
    step, batch = replaced(encoder(position_biased_input=positions)), corrupted()
    detection(step, batch).backward()
    reached = has_gradient(step)
    deltas = {"shared.word_embeddings.delta"} | ({"shared.position_embeddings.delta"} if positions else set())
    assert {name for name in reached if not name.startswith("discriminate.")} == deltas
    step.zero_grad()
    torch.manual_seed(7)
    step(**batch)["loss"].backward()
    word = generator(step).get_input_embeddings().weight
    from_both = word.grad.clone()
    step.zero_grad()
    chosen = batch["labels"] != IGNORE_INDEX
    logits = step.generator(batch) if not positions else generator(step)(**batch).logits[chosen]
    masked_lm(logits, batch["labels"][chosen], None).backward()
    assert not {name for name in has_gradient(step) if not name.startswith("generator.")}
    torch.testing.assert_close(from_both, word.grad)


def test_the_difference_learns_what_a_plain_table_would() -> None:
    student, batch = encoder(), corrupted()
    plain = replaced(student, sharing="nes")
    detection(plain, batch).backward()
    expected = student.get_input_embeddings().weight.grad.clone()
    other = replaced(encoder())
    other.discriminate.load_state_dict(plain.discriminate.state_dict())
    detection(other, batch).backward()
    torch.testing.assert_close(other.shared["word_embeddings"].delta.grad, expected)
    assert other.student.get_input_embeddings().weight.grad is None


@pytest.mark.parametrize("positions", [False, True])
def test_the_student_is_generator_plus_difference_at_any_time(positions: bool, tmp_path: Path) -> None:
    student, batch, inputs = encoder(position_biased_input=positions), corrupted(), tiny.batch()
    step = replaced(student)
    trained(step, batch)
    names = ["word_embeddings", *(["position_embeddings"] if positions else [])]
    theirs = generator(step).deberta.embeddings
    state = student.state_dict()
    for name in names:
        delta = step.shared[name].delta
        assert delta.abs().sum() > 0
        assert torch.equal(state[f"embeddings.{name}.weight"], getattr(theirs, name).weight + delta)
    shown = student(**inputs).last_hidden_state.detach()
    save_model(student, str(tmp_path / "best.safetensors"))
    copied = encoder(seed=1, position_biased_input=positions)
    load_model(copied, tmp_path / "best.safetensors")
    torch.testing.assert_close(copied(**inputs).last_hidden_state, shown)
    step.finish()
    torch.testing.assert_close(student(**inputs).last_hidden_state, shown)
    assert all(each.requires_grad for each in student.parameters())
    for name in names:
        table = getattr(student.embeddings, name)
        assert not table._forward_hooks and not table._state_dict_pre_hooks
    student.save_pretrained(tmp_path)
    kept = DebertaV2Model.from_pretrained(tmp_path)
    torch.testing.assert_close(kept(**inputs).last_hidden_state, shown)


def test_a_resumed_step_goes_on_the_same(tmp_path: Path) -> None:
    step, other, batch = replaced(encoder()), replaced(encoder(seed=1)), corrupted()
    trained(step, batch)
    save_model(step, str(tmp_path / "step.safetensors"))
    load_model(other, tmp_path / "step.safetensors")
    torch.manual_seed(7)
    expected = step(**batch)
    torch.manual_seed(7)
    assert other(**batch) == expected


def test_each_model_is_clipped_by_itself_as_by_an_optimizer_of_its_own(tmp_path: Path) -> None:
    """Ten times the weight of the detection is clipped to the same gradient, and leaves the generator alone."""
    found = []
    for weight in (50.0, 500.0):
        torch.manual_seed(1)
        step = deberta_v3.ReplacedTokenDetection(encoder(), None, None, weight=weight)
        stage = learning.stage((), step="deberta_v3.ReplacedTokenDetection", clip=0.01, steps=3, lr=1e-2)
        corrupt = partial(bert.mask, words=WORDS, rate=0.4, masked=1.0, random=0.0)
        torch.manual_seed(2)
        rows = learning.rows().remove_columns("labels")
        learning.train(step, stage, tmp_path / f"{weight}", data=rows, corrupt=corrupt)
        found.append({name: each.detach().clone() for name, each in step.named_parameters()})
    for name, one in found[0].items():
        torch.testing.assert_close(one, found[1][name], rtol=0, atol=0 if name.startswith("generator.") else 1e-5)


def test_clipped_apart_is_every_parameter_once() -> None:
    for sharing in ("gdes", "es", "nes"):
        step = replaced(encoder(), sharing=sharing)
        first, others = step.clip_groups()
        assert sorted(map(id, (*first, *others))) == sorted(map(id, step.parameters()))
        assert set(map(id, first)) == set(map(id, step.generator.parameters()))


def test_es_shares_one_table_and_nes_none(tmp_path: Path) -> None:
    batch = corrupted()
    one, none = replaced(encoder(), sharing="es"), replaced(encoder(), sharing="nes")
    shared = one.student.get_input_embeddings().weight
    assert generator(one).get_input_embeddings().weight is shared
    assert generator(one).get_output_embeddings().weight is shared
    assert generator(none).get_input_embeddings().weight is not none.student.get_input_embeddings().weight
    detection(one, batch).backward()
    assert shared.grad.any()
    detection(none, batch).backward()
    assert not {name for name in has_gradient(none) if name.startswith("generator.")}
    for step in (one, none):
        trained(step, batch)
        step.finish()
        assert step.student.get_input_embeddings().weight.requires_grad


def test_padding_may_stand_before_the_text() -> None:
    """Generator with positions in its decoder, and detector, whose head adds the state of the first token."""
    step = replaced(encoder())
    alone = corrupted((12,))
    padded = {name: torch.cat([torch.zeros_like(row[:, :3]), row], 1) for name, row in alone.items()}
    padded["labels"][:, :3] = IGNORE_INDEX
    torch.testing.assert_close(step.generator(padded), step.generator(alone), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(detection(step, padded), detection(step, alone), rtol=1e-4, atol=1e-5)


def test_only_an_encoder_of_the_family_is_trained_so() -> None:
    with pytest.raises(StudentError, match=r"not BertForSequenceClassification.*`family: deberta-v2`"):
        replaced(tiny.bert())
    with pytest.raises(StudentError, match=r"not DebertaV2ForSequenceClassification.*`head: encoder`"):
        replaced(tiny.model("deberta-v2"))
    with pytest.raises(ObjectiveError, match="corrupt"):
        replaced(encoder())(**tiny.batch())
