"""Every family of transformers that reads texts: its exported file answers as it does, or it is refused in one line."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification

from compress.errors import CompressError
from compress.exporters.checkpoint import load_source
from compress.exporters.onnx import outputs_of
from compress.exporters.session import open_session
from compress.slicing.shape import positions
from tests import every_family, tiny
from tests.campaign.cases import Record, sample

TOKENS = len(tiny.SPECIAL) + len(tiny.WORDS)
LENGTHS = (1, 8, 64)
"""Tokens of texts, besides the most that a file is made for."""
MOST = 5e-5
"""The largest difference, relative to the largest answer, or to 1."""
LONGEST_LINE = 600
"""Characters of a refusal."""
LOADED = tuple(family for family in every_family.CLASSIFIERS if family not in every_family.UNBUILT)
CASES = [
    *((family, "classifier") for family in LOADED),
    *((family, "encoder") for family in (*LOADED, *every_family.OTHER_ENCODERS)),
]
HEADS: Mapping[str, Any] = {"classifier": AutoModelForSequenceClassification, "encoder": AutoModel}


def draw(model: Any, rows: int, tokens: int, inputs: list[str]) -> dict[str, Tensor]:
    """Draw texts of words of the tiny tokenizer; of several rows the first two are padded."""
    ids = torch.randint(len(tiny.SPECIAL), TOKENS, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, tokens // 2 + 1 :] = 0
        mask[1, 1:] = 0
    if model.config.is_encoder_decoder:  # these classify at the last end of a text
        if rows == 1 and tokens >= 8:
            ids[:, 4] = model.config.eos_token_id
        ids[torch.arange(rows), mask.sum(1) - 1] = model.config.eos_token_id
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    if "token_type_ids" in inputs:
        batch["token_type_ids"] = (torch.arange(tokens) >= tokens // 2).long().expand(rows, tokens) * mask
    return batch


def difference(model: Any, session: Any, rows: int, tokens: int) -> float:
    """Compute the largest difference between the model and the file, in a row of tokens or a batch; the model may
    change itself after a text (BigBird), so it is copied."""
    names = [node.name for node in session.get_inputs()]
    batch = draw(model, rows, tokens, names)
    with torch.no_grad():
        expected = outputs_of(copy.deepcopy(model)(**batch))
    found = session.run(list(expected), {name: batch[name].numpy() for name in names})
    apart = [0.0]
    for one, tensor in zip(found, expected.values(), strict=True):
        other = tensor.numpy()
        assert one.shape == other.shape
        real = batch["attention_mask"].numpy() == 1 if other.ndim == 3 else ...
        largest = max(1.0, float(np.abs(other[real]).max()))
        apart.append(float(np.abs(one[real] - other[real]).max()) / largest)
    return max(apart)


def expected_refusal(family: str, head: str, config: Any) -> bool:
    if head == "encoder" and (config.is_encoder_decoder or family in every_family.REFUSED_HEADLESS):
        return True
    return family in every_family.REFUSED


def readable(model: Any, tokens: int) -> bool:
    """Check that the model itself reads a text of so few tokens: CANINE and Funnel need some to pool."""
    try:
        with torch.no_grad():
            copy.deepcopy(model)(**draw(model, 1, tokens, []))
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


@pytest.mark.parametrize(("family", "head"), sample(CASES, 5))
def test_a_family_is_exported_exactly_or_refused_in_a_line(
    family: str, head: str, tmp_path: Path, record_property: Record, capfd: pytest.CaptureFixture[str]
) -> None:
    made = getattr(every_family, head)(family)
    made.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    capfd.readouterr()
    try:
        source = load_source(str(tmp_path / "model"))
        bundle = source.write(tmp_path / "out")  # type: ignore[union-attr]  # a checkpoint, not a bundle
    except CompressError as error:
        record_property("campaign", f"{head}s: refused")
        said = str(error)
        assert capfd.readouterr().out == ""
        assert "\n" not in said and len(said) < LONGEST_LINE, said
        assert said.startswith((type(made).__name__, str(tmp_path / "model"))), said
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert expected_refusal(family, head, made.config), said
        return
    record_property("campaign", f"{head}s: exact")
    assert not expected_refusal(family, head, made.config), "no longer refused: take it off the list"
    assert capfd.readouterr().out == ""
    longest = bundle.manifest.max_length
    model = HEADS[head].from_pretrained(tmp_path / "model").eval()
    session = open_session(bundle.path / "onnx" / "model.onnx")
    apart = {tokens: difference(model, session, 1, tokens) for tokens in (*LENGTHS, longest) if readable(model, tokens)}
    apart["batch"] = difference(model, session, 3, 9)
    assert set(apart) >= {8, 64, longest}
    assert {where: value for where, value in apart.items() if not value < MOST} == {}


@pytest.mark.parametrize(("family", "head"), sample(CASES, 8))
def test_a_model_reads_as_many_tokens_as_it_has_positions_for_and_no_more(
    family: str, head: str, record_property: Record
) -> None:
    record_property("campaign", "positions")
    model = getattr(every_family, head)(family)
    limit = positions(model)
    if family == "tapas":  # the positions of its cells stop at the last one
        assert limit == every_family.POSITIONS
    elif limit is None:
        assert readable(model, 2 * every_family.POSITIONS + 7)
    else:
        assert readable(model, limit)
        assert not readable(model, limit + 1)
