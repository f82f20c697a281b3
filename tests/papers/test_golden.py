"""The official codes' own values, reproduced directly or through the deviation that `tests/papers/<paper>.py` states.

COMPRESS_GOLDEN names another folder of the same keys, with inputs of other shapes.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM

from compress.config.recipe import Recipe
from compress.config.stages import Stage
from compress.config.term import Term
from compress.data.constants import IGNORE_INDEX
from compress.data.masking import Words
from compress.models.signals import Signals
from compress.papers import deberta, deberta_v3, electra, minillm, minilm, q8bert
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from tests import tiny
from tests.papers.case import authors, case_modules

OWN = Path(__file__).parent.parent / "golden"
FOLDER = Path(os.environ.get("COMPRESS_GOLDEN") or OWN)
EXPECTED: Mapping[str, Any] = json.loads((FOLDER / "losses.json").read_text(encoding="utf-8"))
LEFT_OUT = {
    # Of a library, not of a paper: one counts what the student gives to pads, the others change a temperature by step.
    "textbrewer.att_ce mask",
    "textbrewer.att_ce_mean mask",
    "textbrewer.flsw(1,2) base 4",
    "textbrewer.cwsm(1) base 4",
}


def arrays(folder: Path = FOLDER) -> dict[str, Tensor]:
    with np.load(folder / "losses.npz") as stored:
        return {name: torch.from_numpy(array) for name, array in stored.items()}


WORDS = Words.from_tokenizer(tiny.tokenizer())
OURS: dict[str, Any] = {}
for cases in case_modules().values():
    if hasattr(cases, "golden"):
        OURS |= cases.golden(arrays())


def plain(value: Any) -> Any:
    return {name: part.item() for name, part in value.items()} if isinstance(value, Mapping) else value.tolist()


def test_every_key_is_reproduced_or_named_as_left_out() -> None:
    assert EXPECTED.keys() == OURS.keys() | LEFT_OUT
    assert not OURS.keys() & LEFT_OUT


@pytest.mark.parametrize("key", OURS)
def test_official_value(key: str) -> None:
    assert plain(OURS[key]) == pytest.approx(EXPECTED[key], rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("restrict", "soft_targets"), [(False, "soft_targets"), (True, "masked_soft_targets")])
def test_the_triple_loss_is_assembled_from_terms(restrict: bool, soft_targets: str, temperature: float) -> None:
    """5 L_ce + 2 L_mlm + L_cos; the official total has a fourth, alpha_mse, at weight 1."""
    expected = EXPECTED[f"distilbert.step restrict={restrict} T={temperature}"]
    of = arrays()
    student = Signals(of["mask"], of["token_logits_student"], (of["hidden_student"], of["hidden_student"]))
    teacher = Signals(of["mask"], of["token_logits_teacher"], 3 * (of["hidden_teacher"],))
    terms = [
        Term(f"distilbert.{soft_targets}", 5, options={"temperature": temperature}),
        Term("bert.masked_lm", 2),
        Term("distilbert.cosine", 1, layers="last"),
    ]
    objective = Objective(terms, shape(of, layers=1), shape(of, layers=2))
    parts = objective(student, teacher, {"labels": of["mlm_labels"]})
    assert parts[f"distilbert.{soft_targets}"].item() == pytest.approx(5 * expected["_ce"], rel=1e-5)
    assert parts["bert.masked_lm"].item() == pytest.approx(2 * expected["_mlm"], rel=1e-5)
    assert parts["distilbert.cosine"].item() == pytest.approx(expected["_cos"], rel=1e-5)
    assert parts["total"].item() == pytest.approx(expected[""] - expected["_mse"], rel=1e-5)


def test_pkds_recipe_is_the_authors_whole_loss() -> None:
    """(1 - alpha) CE + alpha KL + beta PT, as intersun/PKD-for-BERT-Model-Compression at 9e9e860 computes it.

    Its functions `distillation_loss` and `patience_loss` of src/KD_loss.py were run once on the arrays of
    tests/golden/losses.npz: the class logits and labels at T 10, and hidden_student[:, :3] and hidden_teacher[:, :3]
    as the [CLS] states of three layers, normalised. Theirs rounds the patience to float16.
    """
    kd, ce, patience = 0.8441082239151001, 1.8554023504257202, 0.1256103515625
    of = arrays(OWN)
    stage = Recipe.load("pkd").stages[0]
    assert isinstance(stage, Stage)

    def signals(of_whom: str) -> Signals:
        hidden = of[f"hidden_{of_whom}"]
        layers = [hidden.roll(-layer, dims=1) for layer in range(4)]  # layer n begins with token n
        return Signals(of["mask"], of[f"class_logits_{of_whom}"], (hidden, *layers))

    objective = Objective(stage.objective, shape(of, layers=4), shape(of, layers=4), kind="classification")
    parts = objective(signals("student"), signals("teacher"), {"labels": of["class_labels"]})
    assert parts["pkd.soft_targets"].item() == pytest.approx(0.5 * kd, rel=1e-5)
    assert parts["bert.labels"].item() == pytest.approx(0.5 * ce, rel=1e-5)
    assert parts["pkd.patience"].item() == pytest.approx(100 * patience, rel=2**-11)


def test_the_losses_of_minilms_first_version_are_cases_of_the_second_ones_code() -> None:
    given, expected = authors("minilm")
    with np.load(Path(__file__).parent.parent / "golden" / "losses.npz") as stored:
        of = {name: torch.from_numpy(array) for name, array in stored.items()}

    def heads(states_BLD: Tensor) -> list[Tensor]:
        """Queries, keys and values: the states, rolled."""
        return [states_BLD.roll(by, -1).unflatten(-1, (given["heads"], -1)).transpose(1, 2) for by in given["rolled"]]

    (q, k, v), (q_T, k_T, v_T) = heads(of["hidden_student"][..., : given["student_width"]]), heads(of["hidden_teacher"])
    scores, scores_T = (a @ b.mT / a.shape[-1] ** 0.5 for a, b in ((q, k), (q_T, k_T)))
    assert minilm.attention(scores, scores_T, of["mask"]).item() == pytest.approx(expected["attention"], rel=1e-5)
    assert minilm.value_relation(v, v_T, of["mask"]).item() == pytest.approx(expected["value_relation"], rel=1e-5)


def shape(of: Mapping[str, Tensor], layers: int) -> Shape:
    D, V = of["hidden_student"].shape[-1], of["token_logits_student"].shape[-1]
    return Shape("bert", layers, D, 1, D, 4 * D, D, vocabulary=V, classes=2)


def most_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every sample be the most likely token, as it was when the official values were computed."""
    monkeypatch.setattr(torch, "multinomial", lambda probabilities, draws: probabilities.argmax(-1, keepdim=True))


def test_electras_loss_is_the_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    """L_MLM + 50 L_Disc, as google-research/electra at 06847f7 computes it.

    TensorFlow 1 does not run here: `_get_masked_lm_output`, `_get_fake_data` and `_get_discriminator_output` of
    run_pretraining.py were transcribed to NumPy (float64), line by line. Student's token logits are the generator's at
    mlm_labels, two positions per row with weight 0 for the missing one, no Gumbel noise; hidden_student[..., 0] are the
    discriminator's logits; the text is 0, 1, 2, ... modulo 11. One label, the second, is changed to 9, which is what
    the generator gives: no replacement. Weights 1 and 50: configure_pretraining.py.
    """
    mlm, disc, total, fake = 2.2767245523169155, 0.5841642091325835, 31.48493500894609, [[1], [2]]
    of = arrays(OWN)
    labels_BL = of["mlm_labels"].clone()
    labels_BL[0, 2] = 9
    stage = Recipe.load("electra-small").stages[0]
    assert isinstance(stage, Stage)
    assert stage.step is not None
    weight = stage.step.options["weight"]
    most_likely(monkeypatch)

    def discriminate(**batch: Any) -> dict[str, Tensor]:
        assert [row.nonzero()[:, 0].tolist() for row in batch["labels"]] == fake
        error = electra.replaced_tokens(of["hidden_student"][..., 0], batch["labels"], batch["attention_mask"])
        return {"loss": weight * error}

    text = {"input_ids": torch.arange(12).view(2, 6) % 11, "attention_mask": of["mask"], "labels": labels_BL}
    logits_RV = of["token_logits_student"][labels_BL != IGNORE_INDEX]
    parts = electra.losses(discriminate, text, logits_RV, 1.0)  # type: ignore[arg-type]
    assert parts["generator"].item() == pytest.approx(mlm, rel=1e-5)
    assert (parts["loss"] - parts["generator"]).item() == pytest.approx(50 * disc, rel=1e-5)
    assert parts["loss"].item() == pytest.approx(total, rel=1e-5)


def test_alberts_recipe_is_the_authors_loss() -> None:
    """L_MLM + L_SOP, as google-research/albert at 4ae12a2 computes it.

    TensorFlow 1 does not run here: `get_masked_lm_output`, `get_sentence_order_output` and the sum of both in
    run_pretraining.py were transcribed to NumPy (float64), line by line. Student's token logits at mlm_labels; the
    first two of class_logits_student and class_labels modulo 2 are the sentence order's.
    """
    mlm, order, total = 4.048574521525299, 1.332800486745135, 5.3813750082704335
    of = arrays(OWN)
    stage = Recipe.load("albert").stages[0]
    assert isinstance(stage, Stage)
    objective = Objective(stage.objective, shape(of, layers=1), None)
    shown = Signals(of["mask"], of["token_logits_student"], pair=of["class_logits_student"][:, :2])
    parts = objective(shown, None, {"labels": of["mlm_labels"], "sentence_order": of["class_labels"] % 2})
    assert parts["bert.masked_lm"].item() == pytest.approx(mlm, rel=1e-5)
    assert parts["albert.sentence_order_prediction"].item() == pytest.approx(order, rel=1e-5)
    assert parts["total"].item() == pytest.approx(total, rel=1e-5)


Q8BERT_THRESHOLDS = [2.926689624786377, 3.173642873764038, 3.002613067626953]
Q8BERT_OUT_TO = [
    [-1.6483434438705444, -1.5416191816329956, -2.1551411151885986, 3.720432996749878],
    [1.5994282960891724, -0.8702626824378967, 1.594719409942627, 0.8140237331390381],
    [-3.477527141571045, -2.678637742996216, -0.3156108856201172, 4.335444927215576],
    [0.8472022414207458, 0.4903602600097656, -2.0265581607818604, -2.4728055000305176],
    [0.6800409555435181, 0.09308235347270966, -1.7674872875213623, 0.3220139741897583],
    [0.12329293042421341, 1.074337363243103, 2.743394136428833, -1.3061840534210205],
]


Q8BERT_OUTPUT_THRESHOLDS = [9.813044548034668, 5.728688716888428, 6.463989734649658, 8.344929695129395]
Q8BERT_ROUNDED_TO = [
    [-1.6226294040679932, -1.5336648225784302, -2.137697458267212, 3.7453620433807373],
    [1.6226294040679932, -0.857047975063324, 1.5778242349624634, 0.788497269153595],
    [-3.477062940597534, -2.6613595485687256, -0.3053853511810303, 4.336734771728516],
    [0.8499487042427063, 0.49618566036224365, -2.035902261734009, -2.496907949447632],
    [0.6954125761985779, 0.09021557867527008, -1.78141450881958, 0.32854053378105164],
    [0.15453612804412842, 1.0825868844985962, 2.7484681606292725, -1.3141621351242065],
]


def test_q8berts_layer_is_the_authors() -> None:
    """Ranges and outputs are those of IntelLabs/nlp-architect at 88b3236, where the deviations make no difference.

    Their `QuantizedLinear` (nn/torch/quantization.py; mode ema, ema_decay 0.9, requantize_output off, then on) was
    trained on three batches: x = hidden_student, 2 x[:, :3] and 0.5 x.flip(0). One layer for each of the first four
    rows of hidden_teacher[0], as they have one scale per matrix, with biases 0.1, 0.2, ... Their range is that of |x|,
    so ours reads |x| to compare the averages; then it is given theirs, symmetric, for the outputs of the third batch.
    """
    of = arrays(OWN)
    plain = nn.Linear(16, 4)
    with torch.no_grad():
        plain.weight.copy_(of["hidden_teacher"][0, :4])
        plain.bias.copy_(0.1 * torch.arange(1, 5))
    layer = q8bert.Int8Linear(plain, decay=0.9, round_weights=q8bert.weights).train()
    x_BLD = of["hidden_student"]
    batches = (x_BLD, 2 * x_BLD[:, :3], 0.5 * x_BLD.flip(0))
    for batch, threshold in zip(batches, Q8BERT_THRESHOLDS, strict=True):
        layer(batch.abs())
        assert layer.ranges_R2[0].tolist() == pytest.approx([0, threshold], rel=1e-6)
    top = Q8BERT_THRESHOLDS[-1]
    layer.ranges_R2.copy_(torch.tensor([[-top, top * 128 / 127]]))  # 0..255 around 127: their -127..127
    found = layer.eval()(batches[-1])
    torch.testing.assert_close(found[0], torch.tensor(Q8BERT_OUT_TO), rtol=1e-5, atol=1e-5)
    # with requantize_output: each row's outputs lie within its own moving average of the largest one
    for row, largest in enumerate(Q8BERT_OUTPUT_THRESHOLDS):
        made = q8bert.Int8Linear(nn.Linear(16, 1), decay=0.9, requantise=True, round_weights=q8bert.weights)
        layer = made.eval()
        layer.weight, layer.bias = (nn.Parameter(each[row : row + 1]) for each in (plain.weight, plain.bias))
        layer.ranges_R2.copy_(torch.tensor([[-end, end * 128 / 127] for end in (top, largest)]))
        expected = torch.tensor(Q8BERT_ROUNDED_TO)[:, row : row + 1]
        torch.testing.assert_close(layer(batches[-1])[0], expected, rtol=1e-5, atol=1e-5)


def test_minillms_gradient_is_the_authors() -> None:
    """Both terms and their gradients, as microsoft/LMOps at 4f2a9de computes them with its rewards one token later.

    Its `_get_advantages_and_returns`, `_pg_loss` and `_reg_loss` (minillm/minillm/losses.py) were run on the token
    logits, with w and the rewards by the lines of `PPOSampler.run_sample` (mix 0.2, reward_scaling 0.5,
    cliprange_reward 100), gamma 1 and one process of torch.distributed, without padding. Moving rewards and mask by
    one token makes their return begin at t + 1, as ours does.
    """
    of = arrays(OWN)
    tokens_R = (7 * torch.arange(12) + 3) % 11
    student_RV, teacher_RV = (of[f"token_logits_{name}"].flatten(0, 1) for name in ("student", "teacher"))
    student_RV.requires_grad_()

    def size(loss: Tensor) -> float:
        return torch.autograd.grad(loss, student_RV, retain_graph=True)[0].norm().item()

    _, long_R = minillm.policy_gradient(student_RV, teacher_RV, tokens_R, torch.ones(2, 6))
    assert long_R.mean().item() == pytest.approx(0.06815919280052185, rel=1e-5)
    assert size(long_R.mean()) == pytest.approx(0.10811293125152588, rel=1e-5)
    single_R, _ = minillm.policy_gradient(student_RV, teacher_RV, tokens_R, torch.ones(2, 6), mix=0.0)
    assert single_R.mean().item() == pytest.approx(2.5058109760284424, rel=1e-5)
    assert size(single_R.mean()) == pytest.approx(0.23566626012325287, rel=1e-5)

    # with the padding of `mask` and without whitening, so that rewards are divided by 0.5
    real_R = of["mask"].flatten().bool()
    _, long_R = minillm.policy_gradient(
        student_RV[real_R], teacher_RV[real_R], tokens_R[real_R], of["mask"], whiten=False
    )
    assert 2 * long_R.mean().item() == pytest.approx(0.7074959874153137, rel=1e-5)
    assert 2 * size(long_R.mean()) == pytest.approx(0.409573495388031, rel=1e-5)


TEXT = {
    "input_ids": torch.tensor([[2, 4, 4, 8, 9, 3], [2, 10, 5, 4, 3, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
    "labels": torch.tensor([[-100, 6, 7, -100, -100, -100], [-100, -100, -100, 9, -100, -100]]),
}
"""Rows with token 4 in the places of 6, 7 and 9; 0 is the pad, and no label of the authors' code."""


def deberta_model(head: Any, layers: int) -> Any:
    sizes = {"hidden": 16, "heads": 2, "vocab_size": 11, "max_position_embeddings": 16, "position_buckets": 4}
    return tiny.model("deberta-v2", head=head, layers=layers, legacy=False, **sizes)


def fill(module: nn.Module, official: Mapping[str, str]) -> None:
    """Give number i of a parameter 0.3 sin(0.7 i^1.5 + crc32(name) mod 1000), plus 1 for the weight of a LayerNorm.

    name: that of the authors' code, by replacing each key of `official`.
    """
    for mine, parameter in module.named_parameters():
        name = mine
        for part, theirs in official.items():
            name = name.replace(part, theirs)
        i = torch.arange(parameter.numel(), dtype=torch.float64)
        wave = 0.3 * torch.sin(0.7 * i**1.5 + zlib.crc32(name.encode()) % 1000)
        parameter.data.copy_((wave + name.endswith("LayerNorm.weight")).view_as(parameter))


def test_debertas_enhanced_mask_decoder_is_the_authors() -> None:
    """Losses and gradients are those of microsoft/DeBERTa at 4d7fe0b: `MaskedLanguageModel`, run once.

    (DeBERTa/apps/models/masked_language_model.py) 3 layers, hidden size 16, 2 heads, 4 buckets, shared keys,
    p2c|c2p, position_biased_input off; parameters and text as in `fill` and TEXT, with 0 where there is no label.
    """
    model = deberta_model(AutoModelForMaskedLM, layers=3)
    step = deberta.EnhancedMaskDecoder(model, None, None).eval()
    fill(step, {"decoder.positions": "deberta.embeddings.position_embeddings", "decoder.model.": ""})
    loss = step(**TEXT)["loss"]
    assert loss.item() == pytest.approx((2.116121768951416 + 1.5144990682601929 + 2.6261043548583984) / 3, rel=1e-5)
    loss.backward()
    layers = model.deberta.encoder.layer
    for parameter, size in (
        (step.decoder.positions.weight, 0.6035640835762024),
        (model.deberta.embeddings.word_embeddings.weight, 6.275587558746338),
        (layers[1].attention.self.query_proj.weight, 0.5204212665557861),
        (layers[2].attention.self.query_proj.weight, 0.9516679644584656),
        (model.deberta.encoder.rel_embeddings.weight, 1.7869807481765747),
    ):
        assert parameter.grad.norm().item() == pytest.approx(size, rel=1e-4)


def test_deberta_v3s_sharing_is_the_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps with gdes are those of microsoft/DeBERTa at 4d7fe0b: `RTDModel`, run once.

    (DeBERTa/apps/tasks/rtd_task.py) The loss is that of `get_loss_fn`, L_MLM + 10 L_RTD (their rtd_lambda), in one
    backward pass; plain SGD at 0.05; samples are the most likely tokens. Generator of 2 layers, discriminator of 4, the
    rest as above. Per step: both losses, the gradients' norms at the generator's table and at the difference.
    """
    expected = [
        (3.149658441543579, 0.7438165545463562, 2.1489388942718506, 8.585638046264648),
        (2.4597036838531494, 0.5638337135314941, 1.6731764078140259, 2.8200650215148926),
        (1.9922528266906738, 0.47674351930618286, 1.6707755327224731, 1.8438076972961426),
    ]
    most_likely(monkeypatch)
    student = deberta_model(AutoModel, layers=4)
    step = deberta_v3.ReplacedTokenDetection(student, None, None, weight=10.0).eval()
    generator: Any = step.generator
    head = "discriminator.mask_predictions"
    fill(
        step,
        {
            "generator.positions": "generator.deberta.embeddings.position_embeddings",
            "generator.model.": "generator.",
            "discriminate.student.deberta": "discriminator.deberta",
            "discriminate.student.norm": f"{head}.LayerNorm",
            "discriminate.student.dense": f"{head}.dense",
            "discriminate.student.out": f"{head}.classifier",
        },
    )
    shared: Any = step.shared["word_embeddings"]
    nn.init.zeros_(shared.delta)
    table = generator.model.deberta.embeddings.word_embeddings.weight
    optimiser = torch.optim.SGD([each for each in step.parameters() if each.requires_grad], lr=0.05)
    for mlm, rtd, at_table, at_difference in expected:
        optimiser.zero_grad()
        parts = step(**TEXT)
        parts["loss"].backward()
        assert parts["generator"].item() == pytest.approx(mlm, rel=1e-4)
        assert parts["loss"].item() == pytest.approx(mlm + 10 * rtd, rel=1e-4)
        assert table.grad.norm().item() == pytest.approx(at_table, rel=1e-4)
        assert shared.delta.grad.norm().item() == pytest.approx(at_difference, rel=1e-4)
        optimiser.step()
