"""Trim vocabularies: tokens that a corpus never uses leave the tokenizer and the embedding together.

    trimmed = trim_bundle(Bundle.load(path), texts, out)

Of a small student the word embedding is most of the file: 9.5 of TinyBERT's 14.4 million parameters. Every text of
the corpus is encoded to the same tokens as before, and answered with the same logits; other texts still can be
spelled, by shorter tokens where a long one is gone. Abdaoui et al. 2020, arXiv:2010.05609, trim multilingual
vocabularies to the tokens of a language; here it is to those of a task.

WordPiece takes the longest match: a token that never was one can go. Byte-pair encoding applies its merges in their
order: those that build the tokens in use are kept, with everything they build on the way, and at each step the first
merge that applies is the same as before. Unigram takes the most probable cut, which stays the most probable of fewer.
Single characters (and bytes) stay, in both forms where there are two.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import Tokenizer

from compress.data.windows import copy_unpadded
from compress.errors import BundleError, CompressError, ExportError
from compress.exporters.artifact import FILES, Bundle
from compress.exporters.manifest import Manifest, stamp_files
from compress.exporters.predictor import encode, open_tokenizer
from compress.exporters.session import read_model, save_changed, token_tables
from compress.io import atomic_folder
from compress.models.checkpoints import describe_origin, save_checkpoint
from compress.models.heads import task_class
from compress.progress import show_progress

CHUNK: Final = 1000
BYTE: Final = 6
"""Length of a byte's token where bytes stand in for unknown characters: <0x0A>."""


def counts(tokenizer: Tokenizer, texts: Iterable[str]) -> NDArray[np.int64]:
    """Count how often each token occurs in the texts: (vocabulary,)."""
    found = np.zeros(1 + max(tokenizer.get_vocab(with_added_tokens=True).values()), np.int64)
    for chunk in show_progress(chunks(texts), "counting tokens", unit="thousand texts"):
        for row in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
            np.add.at(found, row.ids, 1)
    return found


def chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield texts, many at a time."""
    texts = iter(texts)
    while chunk := list(islice(texts, CHUNK)):
        yield chunk


def needed(described: Mapping[str, Any], used: Iterable[int]) -> list[int]:
    """Find the ids, ascending, that go with the `used` ones: what builds these, what spells anything, what is special.

    `described`: the tokenizer's json. Raises CompressError for a model that is none of the three kinds.
    """
    model = described["model"]
    numbers = numbered(described)
    tokens = {number: token for token, number in numbers.items()}
    kept = set(used) | {token["id"] for token in described["added_tokens"]} | set(_framing(described["post_processor"]))
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        kept |= {number for token, number in numbers.items() if len(token) == 1}
        kept |= {
            number for token, number in numbers.items() if len(token) == len(prefix) + 1 and token.startswith(prefix)
        }
        kept.add(numbers[model["unk_token"]])
    elif model["type"] == "BPE":
        if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
            raise CompressError(
                "tokenizer.json: BPE with marks inside words; expected byte BPE, as of RoBERTa and GPT-2"
            )
        built, _ = _find_parts(model, (tokens[number] for number in kept))
        kept |= {numbers[token] for token in built if token in numbers}
        kept |= _spelling(numbers)
        if model.get("unk_token"):
            kept.add(numbers[model["unk_token"]])
    elif model["type"] == "Unigram":
        kept |= _spelling(numbers)
        kept.add(int(np.argmin([score for _, score in model["vocab"]])))  # what is unknown is rated below this one
        if model.get("unk_id") is not None:
            kept.add(model["unk_id"])
    else:
        raise CompressError(f"tokenizer.json: its model is {model['type']}; expected WordPiece, BPE or Unigram")
    return sorted(kept)


def trimmed(described: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Cut the tokenizer's json down to these ids, numbered anew in their order."""
    new = {old: index for index, old in enumerate(kept)}
    model = dict(described["model"])
    if model["type"] == "Unigram":
        model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in new]
        model["unk_id"] = None if model.get("unk_id") is None else new[model["unk_id"]]
    else:
        model["vocab"] = {token: new[number] for token, number in model["vocab"].items() if number in new}
    if model["type"] == "BPE":
        _, merges = _find_parts(model, model["vocab"])
        model["merges"] = [merge for merge in model["merges"] if _pair(merge) in merges]
    padding = described.get("padding")
    return {
        **described,
        "model": model,
        "added_tokens": [{**token, "id": new[token["id"]]} for token in described["added_tokens"]],
        "post_processor": _renumber(described["post_processor"], new),
        "padding": padding and {**padding, "pad_id": new[padding["pad_id"]]},
    }


def numbered(described: Mapping[str, Any]) -> dict[str, int]:
    """Map tokens to ids, with those that were added."""
    vocabulary = described["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in described["added_tokens"]}}


def _spelling(numbers: Mapping[str, int]) -> set[int]:
    """Find single characters, which are bytes in byte BPE, and bytes that are written out."""
    return {
        number
        for token, number in numbers.items()
        if len(token) == 1 or (len(token) == BYTE and token.startswith("<0x") and token.endswith(">"))
    }


def _find_parts(model: Mapping[str, Any], tokens: Iterable[str]) -> tuple[set[str], set[tuple[str, str]]]:
    """Find what byte-pair encoding passes through to build these tokens: the parts, and the merges."""
    ranks = {_pair(merge): rank for rank, merge in enumerate(model["merges"])}
    parts: set[str] = set()
    merges: set[tuple[str, str]] = set()
    for token in tokens:
        symbols = list(token)
        parts.update(symbols)
        while True:
            pairs = [(ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(symbols))]
            rank, at = min(pairs, default=(len(ranks), 0))
            if rank == len(ranks):
                break
            merges.add((symbols[at], symbols[at + 1]))
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            parts.add(symbols[at])
    return parts, merges


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    """Read a merge, of which there are two spellings."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _framing(post: Mapping[str, Any] | None) -> list[int]:
    """Find the ids that a post-processor puts around a text."""
    if post is None:
        return []
    if post["type"] == "Sequence":
        return [number for each in post["processors"] for number in _framing(each)]
    if post["type"] == "TemplateProcessing":
        return [number for special in post["special_tokens"].values() for number in special["ids"]]
    return [post[name][1] for name in ("cls", "sep") if name in post]


def _renumber(post: Mapping[str, Any] | None, new: Mapping[int, int]) -> dict[str, Any] | None:
    """Renumber the post-processor's ids."""
    if post is None:
        return None
    if post["type"] == "Sequence":
        return {**post, "processors": [_renumber(each, new) for each in post["processors"]]}
    if post["type"] == "TemplateProcessing":
        special = {
            token: {**each, "ids": [new[number] for number in each["ids"]]}
            for token, each in post["special_tokens"].items()
        }
        return {**post, "special_tokens": special}
    return {**post, **{name: [post[name][0], new[post[name][1]]] for name in ("cls", "sep") if name in post}}


@dataclass(frozen=True)
class TrimmedTokenizer:
    """The tokens that stay, and the tokenizer of them (its json)."""

    kept: tuple[int, ...]
    described: dict[str, Any]

    @classmethod
    def from_used(cls, described: Mapping[str, Any], used: Iterable[int]) -> "TrimmedTokenizer":
        """Cut a tokenizer's json down to the `used` tokens and what goes with them."""
        kept = needed(described, used)
        return cls(tuple(kept), trimmed(described, kept))

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(json.dumps(self.described))


def cut(
    tokenizer: Tokenizer, texts: Iterable[str], *, min_count: int, keep: Sequence[str], pinned: set[int]
) -> TrimmedTokenizer:
    """Trim a tokenizer; with min_count 1, every text is encoded to the same tokens as before."""
    described = json.loads(tokenizer.to_str())
    used = counts(tokenizer, texts) >= min_count
    used |= counts(tokenizer, keep) > 0
    chosen = set(np.flatnonzero(used).tolist()) | pinned
    found = TrimmedTokenizer.from_used(described, chosen)
    if min_count > 1:
        return found
    if different := [text for text, same in compare_encodings(tokenizer, found.tokenizer, texts) if not same]:
        # words that were unknown: without the tokens at which they failed, another cut may get through
        normal = tokenizer.normalizer
        plain_texts = [text if normal is None else normal.normalize_str(text) for text in different]
        if described["model"]["type"] == "WordPiece":
            # every token whose characters stand in one of these texts, used or not
            prefix, whole = described["model"]["continuing_subword_prefix"], "\n".join(plain_texts)
            bare = ((token.removeprefix(prefix), number) for token, number in described["model"]["vocab"].items())
            chosen |= {number for part, number in bare if part and part in whole}
            found = TrimmedTokenizer.from_used(described, chosen)
            different = [text for text, same in compare_encodings(tokenizer, found.tokenizer, different) if not same]
    if different:
        raise CompressError(
            f"the trimmed tokenizer reads {len(different)} texts of the corpus otherwise, as {different[0]!r:.80}; "
            "nothing was kept. Please report it with the tokenizer.json"
        )
    return found


def compare_encodings(before: Tokenizer, after: Tokenizer, texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield each text, and whether both give it the same tokens."""
    for chunk in show_progress(chunks(texts), "comparing texts", unit="thousand texts"):
        pairs = zip(before.encode_batch(chunk), after.encode_batch(chunk), strict=True)
        for text, (one, other) in zip(chunk, pairs, strict=True):
            yield text, one.tokens == other.tokens


@torch.no_grad()
def cut_model(model: Any, kept: Sequence[int]) -> None:
    """Leave, in place, the rows `kept` (ascending) of the word embedding and of an output layer over the vocabulary,
    and numbers the special tokens of the config anew."""
    rows = torch.tensor(kept)
    new = {old: index for index, old in enumerate(kept)}
    words, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    padding = words.padding_idx
    tables = [words.weight]
    if outputs is not None:
        bias = getattr(outputs, "bias", None)
        tables += [table for table in (outputs.weight, bias) if table is not None and table is not words.weight]
    for table in tables:
        table.data[: len(rows)] = table.data[rows.to(table.device)]
    model.resize_token_embeddings(len(rows))
    model.get_input_embeddings().padding_idx = None if padding is None else new[padding]
    for config in (model.config, getattr(model, "generation_config", None)):
        for name, number in special_ids(config).items():
            setattr(config, name, new[number] if isinstance(number, int) else [new[each] for each in number])


def special_ids(config: Any) -> dict[str, int | list[int]]:
    """Find the fields of a config that hold token ids: pad_token_id, ..."""
    found = {} if config is None else vars(config)
    return {
        name.removeprefix("_"): value
        for name, value in found.items()
        if name.endswith("_token_id") and isinstance(value, int | list)
    }


def pinned(model: Any) -> set[int]:
    """Find the ids that the model itself knows: of special tokens; and, where positions are counted from behind the
    padding id (RoBERTa), all up to that one, so that it stays."""
    ids: set[int] = set()
    for config in (model.config, getattr(model, "generation_config", None)):
        for value in special_ids(config).values():
            ids.update([value] if isinstance(value, int) else value)
    if (padding := model.get_input_embeddings().padding_idx) is not None:
        ids.add(padding)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and (first := getattr(module, "padding_idx", None)) is not None:
            ids.update(range(first + 1))
    return {number for number in ids if number < model.get_input_embeddings().num_embeddings}


def cut_file(source: Path, target: Path, kept: Sequence[int]) -> None:
    """Write the ONNX file `source` with these rows alone in every table that `input_ids` looks up.

    Raises ExportError where it looks none up.
    """
    model = read_model(source)
    tables = token_tables(model.graph)
    if not tables:
        raise ExportError(f"{source}: no table is looked up by input_ids; expected a file of a bundle")
    for tensor in model.graph.initializer:
        if tensor.name in tables:
            rows = numpy_helper.to_array(tensor)[np.asarray(kept)]
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(rows), tensor.name))
    del model.graph.value_info[:]  # shapes of before
    save_changed(model, target)


PROBED: Final = 32
"""Texts of the corpus, and tokens of each in a checkpoint, whose answers are compared."""
TOLERANCE: Final = 1e-5


def compare_files(before: Bundle, after: Bundle, found: TrimmedTokenizer, texts: Iterable[str]) -> None:
    """Raise CompressError where a file's logits changed for rows that both can read."""
    new = {old: index for index, old in enumerate(found.kept)}
    tokenizer = open_tokenizer(before.path, before.manifest.max_length)
    known, renamed = [], []
    for row in encode(tokenizer, list(islice(texts, PROBED))):
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


def first_output(model: Any, row: Sequence[int]) -> Any:
    """Run a model on one row: logits, or the states of its last layer."""
    ids = torch.tensor([row])
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out = model.eval()(input_ids=ids, **decoder)
    return out["logits"] if "logits" in out else out[0]


def check_outputs(model: Any, found: TrimmedTokenizer, rows: Sequence[Sequence[int]], expected: Sequence[Any]) -> None:
    """Raise CompressError where a row that is all kept is answered otherwise than before; of outputs over the
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


WORDS: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
"""The tokenizer's files that are taken over; its older forms (vocab.txt, merges.txt) say the same and would not."""

LIMIT: Final = (
    "The vocabulary was trimmed from {before} to {after} tokens, those of a corpus. Texts unlike it are spelled by "
    "shorter tokens, and may be read less well."
)


@dataclass(frozen=True)
class Trimmed:
    """The result of trimming.

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
    check_new(out)
    model = task_class(bundle.task.kind).from_pretrained(bundle.path)
    with atomic_folder(out) as folder:
        found, trimmed, tokenizer = _trim(bundle.path, model, texts, min_count, keep)
        save_checkpoint(folder, model, tokenizer, bundle.manifest.max_length)
        for name in ("recipe.yaml", "prompt.yaml"):
            if name in bundle.manifest.files:
                shutil.copyfile(bundle.path / name, folder / name)
        for name in FILES.values():
            if name in bundle.manifest.files:
                cut_file(bundle.path / name, folder / name, found.kept)
        made = Manifest.from_model(model, bundle.manifest.max_length, task=bundle.task)
        made = replace(made, threshold=bundle.manifest.threshold)
        limit = LIMIT.format(before=trimmed.before, after=len(found.kept))
        card = {"name": out.name, **describe_origin("", bundle.path), "limits": (limit,)}
        (folder / "README.md").write_text(Bundle(folder, made).card(card), encoding="utf-8")
        made = replace(made, files=stamp_files(folder))
        made.write(folder)
        compare_files(bundle, Bundle(folder, made), found, texts)
        yield Bundle(folder, made), replace(trimmed, path=out, bytes=_sizes(bundle.path, folder))


def trim_checkpoint(
    checkpoint: Path, texts: Iterable[str], out: Path, *, min_count: int = 1, keep: Sequence[str] = ()
) -> Trimmed:
    """Write the same of a folder that transformers loads: weights in its own class, config and tokenizer."""
    import transformers

    from compress.models.teacher import explain_load_errors, load_config

    check_new(out)
    config = load_config(checkpoint)
    with explain_load_errors(checkpoint):
        named = (config.architectures or ["AutoModel"])[0]
        model = getattr(transformers, named).from_pretrained(checkpoint, config=config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    rows = [tokenizer(each, truncation=True, max_length=PROBED)["input_ids"] for each in islice(texts, PROBED)]
    expected = [first_output(model, row) for row in rows]
    with atomic_folder(out) as folder:
        found, trimmed, tokenizer = _trim(checkpoint, model, texts, min_count, keep)
        check_outputs(model, found, rows, expected)
        save_checkpoint(folder, model, tokenizer, tokenizer.model_max_length)
        sizes = _sizes(checkpoint, folder)
    return replace(trimmed, path=out, bytes=sizes)


def _trim(
    source: Path, model: Any, texts: Iterable[str], min_count: int, keep: Sequence[str]
) -> tuple[TrimmedTokenizer, Trimmed, Any]:
    """Cut the model in place; return what was cut, what is to be told, and the tokenizer for transformers."""
    from transformers import AutoTokenizer

    if min_count < 1:
        raise CompressError(f"min_count {min_count}: expected 1 or more: what occurs less often is trimmed")
    if iter(texts) is texts:
        raise CompressError("the corpus is gone through more than once; expected a list, not an iterator")
    old = AutoTokenizer.from_pretrained(source)
    if getattr(old, "backend_tokenizer", None) is None:
        raise CompressError(f"{source}: its tokenizer has no tokenizer.json form; expected a fast tokenizer")
    before = copy_unpadded(old.backend_tokenizer)
    found = cut(before, texts, min_count=min_count, keep=keep, pinned=pinned(model))
    after = found.tokenizer
    alike = [same for _, same in compare_encodings(before, after, texts)]
    if not alike:
        raise CompressError("the corpus has no text in it; expected the texts that the model is to read")
    cut_model(model, found.kept)
    told = Trimmed(source, found.kept, before.get_vocab_size(), len(alike), float(np.mean(alike)), {})
    return found, told, _load(old, found)


def _load(old: Any, found: TrimmedTokenizer) -> Any:
    """Load the tokenizer of transformers with the cut one inside."""
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


def _sizes(before: Path, after: Path) -> dict[str, tuple[int, int]]:
    names = [path.relative_to(after) for path in sorted(after.rglob("*")) if path.suffix in (".onnx", ".safetensors")]
    names.append(Path("tokenizer.json"))
    return {
        str(name): ((before / name).stat().st_size, (after / name).stat().st_size)
        for name in names
        if (before / name).is_file()
    }
