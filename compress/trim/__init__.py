"""Vocabulary trimming: tokens that a corpus never uses leave the tokenizer and the embedding together.

    trimmed = trim_bundle(Bundle.load(path), texts, out)

Of a small student the word embedding is most of the file: 9.5 of TinyBERT's 14.4 million parameters. Every text of
the corpus is encoded to the same tokens as before, and answered with the same logits; other texts still can be
spelled, by shorter tokens where a long one is gone. Abdaoui et al. 2020, arXiv:2010.05609, trim multilingual
vocabularies to the tokens of a language; here it is to those of a task.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from compress.data.windows import plain
from compress.errors import BundleError, CompressError
from compress.export import manifest as manifests
from compress.export.bundle import FILES, Bundle
from compress.export.saved import save
from compress.files import filled
from compress.heads import task_class
from compress.provenance import versions
from compress.trim.checks import PROBED, check_outputs, compare_files, first_output, rows_of
from compress.trim.cut import Cut, cut, encoded_alike
from compress.trim.tables import cut_file, cut_model, pinned

WORDS: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
"""The tokenizer's files that are taken over; its older forms (vocab.txt, merges.txt) say the same and would not."""

LIMIT: Final = (
    "The vocabulary was trimmed from {before} to {after} tokens, those of a corpus. Texts unlike it are spelled by "
    "shorter tokens, and may be read less well."
)


@dataclass(frozen=True)
class Trimmed:
    """What was trimmed.

    path            the folder that was written
    kept            old ids of the tokens that stay, ascending: a token's new id is its place in them
    before          tokens there were
    texts           in the corpus; whole: share of them encoded as before, 1.0 where min_count is 1
    bytes           file -> sizes before and after, of weights, tokenizer and ONNX files
    """

    path: Path
    kept: tuple[int, ...]
    before: int
    texts: int
    whole: float
    bytes: dict[str, tuple[int, int]]


def trim_bundle(
    bundle: Bundle, texts: Iterable[str], out: Path, *, min_count: int = 1, keep: Sequence[str] = ()
) -> Trimmed:
    """Write a bundle without the tokens that occur less than `min_count` times in `texts`, which are gone through
    more than once; those in the texts of `keep` stay in any case.

    Every ONNX file that reads ids is carried over as it is but for its tables' rows. A file with the tokenizer inside
    and the report are of the old vocabulary: they stay behind. Raises BundleError where `out` exists, CompressError
    for a corpus that can be read only once or a tokenizer that cannot be trimmed; nothing is left of a bundle whose
    logits would differ.
    """
    with trimming(bundle, texts, out, min_count=min_count, keep=keep) as (_, trimmed):
        return trimmed


@contextmanager
def trimming(
    bundle: Bundle, texts: Iterable[str], out: Path, *, min_count: int = 1, keep: Sequence[str] = ()
) -> Iterator[tuple[Bundle, Trimmed]]:
    """Yield the bundle of `trim_bundle` in a folder beside `out` for the caller to finish; then it gets its name."""
    model = task_class(bundle.task.kind).from_pretrained(bundle.path)
    with _new(out) as folder:
        found, trimmed, tokenizer = _trim(bundle.path, model, texts, min_count, keep)
        save(folder, model, tokenizer, bundle.manifest.max_length)
        for name in ("recipe.yaml", "prompt.yaml"):
            if name in bundle.manifest.files:
                shutil.copyfile(bundle.path / name, folder / name)
        for name in FILES.values():
            if name in bundle.manifest.files:
                cut_file(bundle.path / name, folder / name, found.kept)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        made = replace(bundle.manifest, parameters=parameters, versions=versions(manifests.PACKAGES), files={})
        card = {"name": out.name, "limits": (LIMIT.format(before=trimmed.before, after=len(found.kept)),)}
        (folder / "README.md").write_text(Bundle(folder, made).card(card), encoding="utf-8")
        made = replace(made, files=manifests.stamps(folder))
        made.write(folder)
        compare_files(bundle, Bundle(folder, made), found, texts)
        yield Bundle(folder, made), replace(trimmed, path=out, bytes=_sizes(bundle.path, folder))


def trim_checkpoint(
    checkpoint: Path, texts: Iterable[str], out: Path, *, min_count: int = 1, keep: Sequence[str] = ()
) -> Trimmed:
    """The same of a folder that transformers loads: weights in its own class, config and tokenizer."""
    import transformers

    from compress.teachers import explained, load_config

    config = load_config(checkpoint)
    with explained(checkpoint):
        named = (config.architectures or ["AutoModel"])[0]
        model = getattr(transformers, named).from_pretrained(checkpoint, config=config)
    rows = rows_of(checkpoint, list(islice(texts, PROBED)))
    expected = [first_output(model, row) for row in rows]
    with _new(out) as folder:
        found, trimmed, tokenizer = _trim(checkpoint, model, texts, min_count, keep)
        check_outputs(model, found, rows, expected)
        save(folder, model, tokenizer, tokenizer.model_max_length)
        sizes = _sizes(checkpoint, folder)
    return replace(trimmed, path=out, bytes=sizes)


def _trim(
    source: Path, model: Any, texts: Iterable[str], min_count: int, keep: Sequence[str]
) -> tuple[Cut, Trimmed, Any]:
    """Cuts the model in place; gives what was cut, what is to be told, and the tokenizer for transformers."""
    from transformers import AutoTokenizer

    if min_count < 1:
        raise CompressError(f"min_count {min_count}: expected 1 or more: what occurs less often is trimmed")
    if iter(texts) is texts:
        raise CompressError("the corpus is gone through more than once; expected a list, not an iterator")
    old = AutoTokenizer.from_pretrained(source)
    if getattr(old, "backend_tokenizer", None) is None:
        raise CompressError(f"{source}: its tokenizer has no tokenizer.json form; expected a fast tokenizer")
    before = plain(old.backend_tokenizer)
    found = cut(before, texts, min_count=min_count, keep=keep, pinned=pinned(model))
    after = found.tokenizer
    alike = [same for _, same in encoded_alike(before, after, texts)]
    if not alike:
        raise CompressError("the corpus has no text in it; expected the texts that the model is to read")
    cut_model(model, found.kept)
    told = Trimmed(source, found.kept, before.get_vocab_size(), len(alike), float(np.mean(alike)), {})
    return found, told, _loaded(old, found)


def _loaded(old: Any, found: Cut) -> Any:
    """The tokenizer of transformers with the cut one inside."""
    from transformers import AutoTokenizer

    new = {str(number): str(index) for index, number in enumerate(found.kept)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        old.save_pretrained(folder)
        for path in folder.iterdir():
            if path.name not in WORDS:
                path.unlink()
        (folder / WORDS[0]).write_text(json.dumps(found.described, ensure_ascii=False), encoding="utf-8")
        config = json.loads((folder / WORDS[1]).read_text(encoding="utf-8"))
        if known := config.get("added_tokens_decoder"):
            config["added_tokens_decoder"] = {new[number]: token for number, token in known.items() if number in new}
        (folder / WORDS[1]).write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
        made = AutoTokenizer.from_pretrained(folder)
    if made.get_vocab() != found.tokenizer.get_vocab(with_added_tokens=True):
        raise CompressError(
            f"transformers reads the trimmed tokenizer otherwise than it was written ({type(made).__name__}); nothing "
            "was kept. Please report it with the tokenizer.json"
        )
    return made


def check_new(out: Path) -> None:
    """Raise BundleError where something is already."""
    if out.exists():
        raise BundleError(f"{out}: exists; expected a new folder: trimming changes every file")


@contextmanager
def _new(out: Path) -> Iterator[Path]:
    check_new(out)
    with filled(out) as partial:
        yield partial


def _sizes(before: Path, after: Path) -> dict[str, tuple[int, int]]:
    names = [path.relative_to(after) for path in sorted(after.rglob("*")) if path.suffix in (".onnx", ".safetensors")]
    names.append(Path("tokenizer.json"))
    return {
        str(name): ((before / name).stat().st_size, (after / name).stat().st_size)
        for name in names
        if (before / name).is_file()
    }
