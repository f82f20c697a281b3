"""The proof that nothing but the vocabulary changed: the same answers for texts of which every token stays."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from compress.data.windows import plain
from compress.errors import CompressError
from compress.export.bundle import FILES, Bundle
from compress.export.predictor import rows_of as encoded
from compress.trim.cut import Cut

PROBED: Final = 32
"""Texts of the corpus, and tokens of each in a checkpoint, whose answers are compared."""
TOLERANCE: Final = 1e-5


def compare_files(before: Bundle, after: Bundle, found: Cut, texts: Iterable[str]) -> None:
    """Raises CompressError where a file's logits changed for rows that both can read."""
    new = {old: index for index, old in enumerate(found.kept)}
    tokenizer = plain(Tokenizer.from_file(str(before.path / "tokenizer.json")))
    tokenizer.enable_truncation(before.manifest.max_length)
    known, renamed = [], []
    for row in encoded(tokenizer, list(islice(texts, PROBED))):
        if all(number in new for number in row["input_ids"]):
            known.append(row)
            renamed.append({**row, "input_ids": [new[number] for number in row["input_ids"]]})
    for precision, name in FILES.items():
        if name not in before.manifest.files or not known:
            continue
        expected, logits = (
            each.logits(rows, precision=precision) for each, rows in ((before, known), (after, renamed))
        )
        difference = float(np.abs(expected - logits).max())
        if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
            raise CompressError(
                f"{before.path}: trimmed, its {precision} file's logits change by {difference:.2g} for texts of the "
                "corpus; nothing was kept. Its graph has token ids inside"
            )


def rows_of(checkpoint: Path, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts, of at most PROBED tokens each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return [tokenizer(text, truncation=True, max_length=PROBED)["input_ids"] for text in texts]


def first_output(model: Any, row: Sequence[int]) -> Any:
    """What a model says of one row: logits, or the states of its last layer."""
    import torch

    ids = torch.tensor([row])
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out = model.eval()(input_ids=ids, **decoder)
    return out["logits"] if "logits" in out else out[0]


def check_outputs(model: Any, found: Cut, rows: Sequence[Sequence[int]], expected: Sequence[Any]) -> None:
    """Raises CompressError where a row that is all kept is answered otherwise than before; of outputs over the
    vocabulary, those of the tokens that stay."""
    new = {old: index for index, old in enumerate(found.kept)}
    for row, wanted in zip(rows, expected, strict=True):
        if any(number not in new for number in row):
            continue
        said = first_output(model, [new[number] for number in row])
        alike = wanted[..., list(found.kept)] if said.shape != wanted.shape else wanted
        limit = TOLERANCE * max(1.0, float(alike.abs().max()))
        if said.shape != alike.shape or not float((said - alike).abs().max()) <= limit:
            raise CompressError(
                f"{type(model).__name__}: trimmed, it answers otherwise than before; nothing was kept. It has tables "
                "over the vocabulary that transformers does not name, or token ids inside"
            )
