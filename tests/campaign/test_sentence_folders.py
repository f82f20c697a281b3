"""Folders of sentence-transformers give the vectors of sentence-transformers, or are refused by name.

The modules are compared in torch for every folder, which takes a few hundredths of a second; an export takes one, so
that some of the folders are exported here, and all in the whole campaign.
"""

import logging
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from compress.data.collate import Collate
from compress.data.encoder import encoder_of
from compress.data.text_preparation import count_prompt_tokens, prepend
from compress.errors import CompressError
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import Checkpoint, load_source
from tests.campaign import cases, sentence_folders
from tests.campaign.cases import Record
from tests.campaign.sentence_folders import POSITIONS, TEXTS, Drawn

FOLDERS = 3000 if cases.WHOLE else 100
EXPORTED = 300 if cases.WHOLE else 10
PARTS = 10 if cases.WHOLE else 1
TOLERANCE = 1e-4
BEYOND = ("index out of range", "must match the size", "is out of bounds")
"""Errors of torch for more tokens than a model has positions."""
EQUAL = "with the library's vectors"


class Ending(NamedTuple):
    """How a folder ended: what was drawn, the end in words, and what is wrong."""

    about: str
    how: str
    fault: Any


Vectors = NDArray[np.float32]
Embed = Callable[[list[str], str | None], Vectors]
"""(texts, name of a prompt) -> vectors."""


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.ERROR)
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):  # of the library, about older names
        yield
    transformers_logging.set_verbosity(before)


def open_library(folder: Path) -> Embed:
    """Open a folder with sentence-transformers; where its tokenizer pads on the left, each text is embedded alone, as
    the vectors of a batch depend on the padding."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    batch = 1 if model.tokenizer.padding_side == "left" else 8

    def embed(texts: list[str], name: str | None) -> Vectors:
        if name == "query":
            return np.asarray(model.encode_query(texts, batch_size=batch))
        if name == "document":
            return np.asarray(model.encode_document(texts, batch_size=batch))
        return np.asarray(model.encode(texts, prompt_name=name, batch_size=batch))

    return embed


def embed_short(library: Embed, texts: list[str], name: str | None) -> tuple[list[str], Sequence[Vectors]]:
    """Embed the texts that have no more tokens than the model has positions, beyond which the library fails; return
    these texts too."""
    try:
        return texts, library(texts, name)
    except (IndexError, RuntimeError) as error:
        if not any(sign in str(error) for sign in BEYOND):
            raise
        if len(texts) == 1:
            return [], []
    kept, vectors = list[str](), list[Vectors]()
    for text in texts:
        one, found = embed_short(library, [text], name)
        kept += one
        vectors += list(found)
    return kept, vectors


def open_modules(checkpoint: Checkpoint) -> Embed:
    """Run the torch module of a checkpoint on rows of its tokenizer."""
    encoder = encoder_of(checkpoint.tokenizer)
    collate = Collate(checkpoint.tokenizer)
    assert checkpoint.task is not None
    preparation = checkpoint.task.preparation

    def embed(texts: list[str], name: str | None) -> Vectors:
        prompt = preparation.prompt(name)
        rows: list[dict[str, Any]] = [*encoder.encode(prepend(prompt, texts), checkpoint.max_length)]
        (alone,) = encoder.encode([prompt], checkpoint.max_length)
        length = count_prompt_tokens(alone["input_ids"], encoder.settings.special_ids) if prompt else 0
        batch = collate([{**row, "prompt_length": length} for row in rows])
        with torch.no_grad():
            found: Vectors = checkpoint.model(**batch).sentence_embedding.numpy()
        return found

    return embed


def open_bundle(bundle: Bundle) -> Embed:
    return lambda texts, name: bundle.embed(texts, precision="fp32", prompt_name=name)


def compare(drawn: Drawn, texts: list[str], others: dict[str, Embed]) -> dict[str, Any]:
    """Return what differs from sentence-transformers."""
    library, faults = open_library(drawn.folder), dict[str, Any]()
    for name in drawn.prompts:
        kept, found_there = embed_short(library, texts, name)
        if not kept:
            continue
        wanted = np.stack(found_there)
        for other, embed in others.items():
            found = embed(kept, name)
            if found.shape != wanted.shape:
                faults[f"{other}, {name}"] = [found.shape, wanted.shape]
            elif not np.allclose(found, wanted, atol=TOLERANCE, rtol=1e-5):
                worst = int(np.abs(found - wanted).max(1).argmax())
                faults[f"{other}, {name}"] = [kept[worst], float(np.abs(found - wanted).max())]
    return faults


def compare_modules(drawn: Drawn, texts: list[str], found: Checkpoint) -> dict[str, Any]:
    return compare(drawn, texts, {"torch": open_modules(found)})


def compare_export(drawn: Drawn, texts: list[str], found: Checkpoint) -> dict[str, Any]:
    bundle = found.write(drawn.folder / "exported")
    return compare(drawn, texts, {"bundle": open_bundle(bundle), "library": open_library(bundle.path)})


def check(folder: Path, draw: random.Random, read: Callable[[Drawn, list[str], Checkpoint], dict[str, Any]]) -> Ending:
    """Write a folder and read it."""
    drawn = sentence_folders.write(folder, draw)
    texts = draw.sample(TEXTS, 5)
    about = "; ".join(drawn.about)
    try:
        source = load_source(str(drawn.folder))
    except CompressError as error:
        named = next((name for name in drawn.refused if name in str(error)), None)
        if named is not None:
            return Ending(about, f"refused for {named}", None)
        return Ending(about, "refused", f"{error}, expected {drawn.refused or 'vectors'}")
    assert isinstance(source, Checkpoint)
    assert source.max_length <= POSITIONS
    if drawn.refused:
        return Ending(about, EQUAL, f"expected to be refused for {drawn.refused}")
    return Ending(about, EQUAL, read(drawn, texts, source) or None)


def check_all(endings: list[Ending], kind: str, record_property: Record) -> None:
    ends = Counter(ending.how for ending in endings)
    faults = {f"{number}: {ending.about}": ending.fault for number, ending in enumerate(endings) if ending.fault}
    assert ends[EQUAL]
    cases.record(record_property, kind, len(endings), faults, ends)


@pytest.mark.parametrize("part", range(PARTS))
def test_modules_compute_the_same(part: int, tmp_path: Path, record_property: Record) -> None:
    endings = [
        check(tmp_path / str(number), cases.draw("sentence folder", number), compare_modules)
        for number in range(part, FOLDERS, PARTS)
    ]
    check_all(endings, "sentence folders, beside the library", record_property)


@pytest.mark.parametrize("part", range(PARTS))
def test_exports_compute_the_same(part: int, tmp_path: Path, record_property: Record) -> None:
    """In onnxruntime, and the exported folder in the library."""
    endings = [
        check(tmp_path / str(number), cases.draw("sentence export", number), compare_export)
        for number in range(part, EXPORTED, PARTS)
    ]
    check_all(endings, "sentence exports, beside the library", record_property)
