"""Trim vocabularies: remove tokens that a corpus never uses from the tokenizer and the
embedding.

    trimmed = trim_bundle(Bundle.load(path), texts, out)

In a small student the word embedding is most of the file: 9.5 of TinyBERT's 14.4
million parameters. Every text of the corpus is encoded to the same tokens as before,
and gets the same logits; other texts can still be encoded, with shorter tokens in place
of removed ones. Abdaoui et al. 2020, arXiv:2010.05609, trim multilingual vocabularies
to the tokens of a language; here, to the tokens of a task.

WordPiece takes the longest match: a token that was never one can be removed. Byte-pair
encoding applies its merges in order: those that build the used tokens are kept, with
all intermediate tokens, so that the first applicable merge is the same at each step.
Unigram takes the most probable segmentation, which is still the most probable of the
remaining ones. Single characters (and bytes) are kept, with and without a prefix.
"""

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from onnx import GraphProto, numpy_helper
from tokenizers import Tokenizer

from compress.arrays import Longs
from compress.data.encoder import TextEncoder, encoder_of, text_encoder_of
from compress.errors import CompressError, ExportError, first_reason
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES, Manifest, stamp_files
from compress.exporters.session import read_model, save_changed, token_tables
from compress.exporters.tokenizer.wordpiece import TokenizerJson
from compress.io import JsonObject, atomic_folder
from compress.models.checkpoints import describe_origin, save_checkpoint
from compress.models.folder import ModelFolder
from compress.models.sentence_folder import read_prompts
from compress.outputs import check_new_folder
from compress.progress import show_progress
from compress.slicing.cut import has_own_head
from compress.slicing.shape import positions

TEXTS_PER_CHUNK: Final = 1000


def count_tokens(encoder: TextEncoder, texts: Iterable[str]) -> Longs:
    """Count how often each token occurs in the texts: (vocabulary,)."""
    counts = np.zeros(
        1 + max(encoder.backend.get_vocab(with_added_tokens=True).values()), np.int64
    )
    for chunk in show_progress(chunks(texts), "counting tokens", unit="thousand texts"):
        ids = encoder.piece_arrays(chunk).ids
        counts += np.bincount(ids, minlength=len(counts))
    return counts


def chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while chunk := list(islice(texts, TEXTS_PER_CHUNK)):
        yield chunk


def find_frequent(config: TokenizerJson, most: int) -> list[int]:
    """Find the `most` most frequent tokens of a vocabulary by its own order, apart from
    single characters and unused places: the first words of WordPiece, the first merges
    of BPE, the best scores of Unigram.

    `config`: the content of tokenizer.json.
    """
    model = config["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        best = sorted(vocabulary, key=itemgetter(1), reverse=True)
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        ordered = [token for token, _ in best]
    elif "merges" not in model:
        ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    else:
        ordered = ["".join(_pair(merge)) for merge in model["merges"]]
    words = (token for token in ordered if len(token) > 1 and token in vocabulary)
    found = (token for token in words if not UNUSED_PATTERN.fullmatch(token))
    return [vocabulary[token] for token in islice(found, most)]


UNUSED_PATTERN: Final = re.compile(r"\[.*\]|<.*>")
"""Pattern of special tokens, and of unused places such as BERT's [unused0]."""


def find_needed(config: TokenizerJson, used: Iterable[int]) -> list[int]:
    """Find the ids to keep, ascending: the `used` ones, those that build them, single
    characters, special tokens.

    `config`: the content of tokenizer.json. Raises CompressError for any model but
    WordPiece, byte BPE and Unigram.
    """
    model = config["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    ids = {
        **vocabulary,
        **{token["content"]: token["id"] for token in config["added_tokens"]},
    }
    tokens = {number: token for token, number in ids.items()}
    kept = (
        set(used)
        | {token["id"] for token in config["added_tokens"]}
        | set(_framing(config["post_processor"]))
    )
    # in byte BPE, single characters are bytes
    kept |= {number for token, number in ids.items() if len(token) == 1}
    # such as <0x0A>, where bytes stand in for unknown characters
    byte_tokens = {
        number for token, number in ids.items() if re.fullmatch("<0x..>", token)
    }
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        kept |= {
            number
            for token, number in ids.items()
            if len(token) == len(prefix) + 1 and token.startswith(prefix)
        }
        kept.add(ids[model["unk_token"]])
    elif model["type"] == "BPE":
        if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
            raise CompressError(
                "tokenizer.json: BPE with marks inside words; expected byte BPE, as in "
                "RoBERTa and GPT-2"
            )
        parts, _ = _find_parts(model, (tokens[number] for number in kept))
        kept |= {ids[token] for token in parts if token in ids} | byte_tokens
        if model.get("unk_token"):
            kept.add(ids[model["unk_token"]])
    elif model["type"] == "Unigram":
        kept |= byte_tokens
        # unknown tokens score below the minimum
        kept.add(int(np.argmin([score for _, score in model["vocab"]])))
        if model.get("unk_id") is not None:
            kept.add(model["unk_id"])
    else:
        raise CompressError(
            f"tokenizer.json: its model is {model['type']}; expected WordPiece, BPE or "
            "Unigram"
        )
    return sorted(kept)


def _new_ids(kept: Sequence[int]) -> dict[int, int]:
    """Map the ids of the kept tokens to their new ones."""
    return {old: index for index, old in enumerate(kept)}


def trim_config(config: TokenizerJson, kept: Sequence[int]) -> JsonObject:
    """Reduce the content of tokenizer.json, as an encoder's backend has it, without
    padding, to these ids, renumbered in their order."""
    new = _new_ids(kept)
    model = dict(config["model"])
    if model["type"] == "Unigram":
        model["vocab"] = [
            entry for number, entry in enumerate(model["vocab"]) if number in new
        ]
        model["unk_id"] = None if model.get("unk_id") is None else new[model["unk_id"]]
    else:
        model["vocab"] = {
            token: new[number]
            for token, number in model["vocab"].items()
            if number in new
        }
    if model["type"] == "BPE":
        _, merges = _find_parts(model, model["vocab"])
        model["merges"] = [merge for merge in model["merges"] if _pair(merge) in merges]
    return {
        **config,
        "model": model,
        "added_tokens": [
            {**token, "id": new[token["id"]]} for token in config["added_tokens"]
        ],
        "post_processor": _renumber(config["post_processor"], new),
    }


def _find_parts(
    model: TokenizerJson, tokens: Iterable[str]
) -> tuple[set[str], set[tuple[str, str]]]:
    """Find the intermediate tokens and the merges with which byte-pair encoding builds
    these tokens."""
    ranks = {_pair(merge): rank for rank, merge in enumerate(model["merges"])}
    parts: set[str] = set()
    merges: set[tuple[str, str]] = set()
    for token in tokens:
        symbols = list(token)
        parts.update(symbols)
        while True:
            pairs = [
                (ranks.get(pair, len(ranks)), at)
                for at, pair in enumerate(pairwise(symbols))
            ]
            rank, at = min(pairs, default=(len(ranks), 0))
            if rank == len(ranks):
                break
            merges.add((symbols[at], symbols[at + 1]))
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            parts.add(symbols[at])
    return parts, merges


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    """Read a merge: "a b", or ["a", "b"]."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _framing(post: TokenizerJson | None) -> list[int]:
    """Find the ids that a post-processor adds to a text."""
    if post is None:
        return []
    if post["type"] == "Sequence":
        return [number for each in post["processors"] for number in _framing(each)]
    if post["type"] == "TemplateProcessing":
        return [
            number
            for special in post["special_tokens"].values()
            for number in special["ids"]
        ]
    return [post[name][1] for name in ("cls", "sep") if name in post]


def _renumber(post: TokenizerJson | None, new: Mapping[int, int]) -> JsonObject | None:
    if post is None:
        return None
    if post["type"] == "Sequence":
        return {
            **post,
            "processors": [_renumber(each, new) for each in post["processors"]],
        }
    if post["type"] == "TemplateProcessing":
        special = {
            token: {**each, "ids": [new[number] for number in each["ids"]]}
            for token, each in post["special_tokens"].items()
        }
        return {**post, "special_tokens": special}
    ends = {
        name: [post[name][0], new[post[name][1]]]
        for name in ("cls", "sep")
        if name in post
    }
    return {**post, **ends}


@dataclass(frozen=True)
class TrimmedTokenizer:
    """The ids that are kept, and the content of the trimmed tokenizer.json."""

    kept: tuple[int, ...]
    config: JsonObject

    @classmethod
    def from_used(
        cls, config: TokenizerJson, used: Iterable[int]
    ) -> "TrimmedTokenizer":
        """Reduce the content of tokenizer.json to the `used` tokens and those that they
        need."""
        kept = find_needed(config, used)
        return cls(tuple(kept), trim_config(config, kept))

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(json.dumps(self.config))

    def encoder(self, before: TextEncoder) -> TextEncoder:
        """Return the encoder that replaces `before`."""
        return TextEncoder.from_backend(self.tokenizer, before.settings, before.name)


def trim_tokenizer(
    before: TextEncoder,
    texts: Iterable[str],
    *,
    min_count: int,
    keep: Iterable[str],
    pinned: set[int],
) -> TrimmedTokenizer:
    """Trim a tokenizer; with min_count 1, every text is encoded to the same tokens as
    before."""
    config = json.loads(before.backend.to_str())
    used = (count_tokens(before, texts) >= min_count) | (count_tokens(before, keep) > 0)
    kept = set(np.flatnonzero(used).tolist()) | pinned
    trimmed = TrimmedTokenizer.from_used(config, kept)
    if min_count > 1:
        return trimmed
    different = [
        text
        for text, same in compare_encodings(before, trimmed.encoder(before), texts)
        if not same
    ]
    if different and config["model"]["type"] == "WordPiece":
        # Words that were unknown: without the tokens at which matching failed, it may
        # succeed. Keep every token that occurs in one of these texts, used or not.
        normal = before.backend.normalizer
        prefix = config["model"]["continuing_subword_prefix"]
        normalized = "\n".join(
            text if normal is None else normal.normalize_str(text) for text in different
        )
        parts = (
            (token.removeprefix(prefix), number)
            for token, number in config["model"]["vocab"].items()
        )
        kept |= {number for part, number in parts if part and part in normalized}
        trimmed = TrimmedTokenizer.from_used(config, kept)
        after = trimmed.encoder(before)
        different = [
            text
            for text, same in compare_encodings(before, after, different)
            if not same
        ]
    if different:
        raise CompressError(
            f"the trimmed tokenizer encodes {len(different)} texts of the corpus "
            f"differently, such as {different[0]!r:.80}; nothing was written. Please "
            "report it with the tokenizer.json"
        )
    return trimmed


def compare_encodings(
    before: TextEncoder, after: TextEncoder, texts: Iterable[str]
) -> Iterator[tuple[str, bool]]:
    """Yield each text, and whether both tokenizers encode it to the same tokens."""
    old = before.backend.get_vocab(with_added_tokens=True)
    new = after.backend.get_vocab(with_added_tokens=True)
    places = np.full(1 + max(old.values()), -1)
    common = old.keys() & new.keys()
    places[[old[token] for token in common]] = [new[token] for token in common]
    # what is put around a text: its own tokens may differ
    framed = before.tokens([""]) == after.tokens([""])
    for chunk in show_progress(chunks(texts), "comparing texts", unit="thousand texts"):
        first = before.piece_arrays(chunk)
        second = after.piece_arrays(chunk)
        renumbered = places[first.ids]
        expected = np.split(renumbered, first.bounds[1:-1])
        found = np.split(second.ids, second.bounds[1:-1])
        for text, own, other in zip(chunk, expected, found, strict=True):
            yield text, framed and np.array_equal(own, other)


@torch.no_grad()
def trim_model(model: Any, kept: Sequence[int]) -> None:
    """Keep only the rows `kept` (ascending) of the word embedding and of an output
    layer over the vocabulary, in place, and renumber the special tokens of the config,
    None for one beyond the vocabulary, as GPT-2's by default; and the tokens that rules
    of generation forbid or prefer, without removed ones and sequences that have any."""
    rows = torch.tensor(kept)
    new = _new_ids(kept)
    words = model.get_input_embeddings()
    outputs = model.get_output_embeddings()
    padding = words.padding_idx
    tables = {words.weight}
    if outputs is not None:
        tables.update(outputs.parameters())
    for table in tables:
        table.data[: len(rows)] = table.data[rows.to(table.device)]
    own = has_own_head(model)
    head: Any = getattr(outputs, "weight", None)
    model.resize_token_embeddings(len(rows))
    if own:
        model.get_output_embeddings().weight = torch.nn.Parameter(head[: len(rows)])
    model.get_input_embeddings().padding_idx = None if padding is None else new[padding]
    rules = ("suppress_tokens", "bad_words_ids", "sequence_bias")
    for config, name, ids in token_fields(model, "_token_id", *rules):
        if isinstance(ids, list):
            found = (_find_new_ids(each, new) for each in ids)
            kept_ids = [each for each in found if each is not None]
            setattr(config, name, kept_ids or None)
        else:
            setattr(config, name, new.get(ids))


def _find_new_ids(ids: Any, new: Mapping[int, int]) -> Any:
    """Return an id, or a sequence of ids, also with what is added to its logits; None
    for a token that is removed, and a sequence of one."""
    if isinstance(ids, list):
        found = [_find_new_ids(each, new) for each in ids]
        return None if None in found else found
    return ids if isinstance(ids, float) else new.get(ids)


def token_fields(model: Any, *endings: str) -> Iterator[tuple[Any, str, Any]]:
    """Yield the fields of a model's configs that hold token ids, by the endings of
    their names, such as pad_token_id: config, name, value."""
    for config in filter(
        None, (model.config, getattr(model, "generation_config", None))
    ):
        for name, value in list(vars(config).items()):
            if name.endswith(endings) and isinstance(value, int | list):
                yield config, name.removeprefix("_"), value


def find_pinned(model: Any) -> set[int]:
    """Find the ids that the model depends on: special tokens; and, if positions are
    counted from the padding id (RoBERTa), all ids up to it, so that it does not
    change."""
    ids: set[int] = set()
    for *_, value in token_fields(model, "_token_id"):
        ids.update([value] if isinstance(value, int) else value)
    if (padding := model.get_input_embeddings().padding_idx) is not None:
        ids.add(padding)
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and (first := getattr(module, "padding_idx", None)) is not None
        ):
            ids.update(range(first + 1))
    return ids & set(range(model.get_input_embeddings().num_embeddings))


def trim_file(source: Path, target: Path, kept: Sequence[int]) -> None:
    """Write the ONNX file `source` with only these rows of every table that `input_ids`
    indexes.

    Raises ExportError if there is none.
    """
    model = read_model(source)
    tables = token_tables(model.graph)
    if not tables:
        raise ExportError(
            f"{source}: input_ids index no table; expected a file of a bundle"
        )
    for tensor in model.graph.initializer:
        if tensor.name in tables:
            rows = numpy_helper.to_array(tensor)[np.asarray(kept)]
            tensor.CopyFrom(
                numpy_helper.from_array(np.ascontiguousarray(rows), tensor.name)
            )
    _renumber_compared(model.graph, kept)
    del model.graph.value_info[:]  # with the old shapes
    save_changed(model, target)


def _renumber_compared(graph: GraphProto, kept: Sequence[int]) -> None:
    """Renumber the ids with which a graph compares `input_ids`, such as the padding id
    of decoders that classify the last token."""
    new = _new_ids(kept)
    constants = {each.name: each for each in graph.initializer} | {
        node.output[0]: node.attribute[0].t
        for node in graph.node
        if node.op_type == "Constant" and node.attribute[0].name == "value"
    }
    for node in graph.node:
        if node.op_type != "Equal" or "input_ids" not in node.input:
            continue
        at = 1 - list(node.input).index("input_ids")
        if (other := constants.get(node.input[at])) is not None:
            ids = numpy_helper.to_array(other)
            changed = [new.get(number, -1) for number in ids.ravel().tolist()]
            name = f"{node.name}/renumbered"
            values = np.array(changed, ids.dtype).reshape(ids.shape)
            graph.initializer.append(numpy_helper.from_array(values, name))
            node.input[at] = name


PROBED: Final = 32
"""Number of texts of the corpus, and of tokens of each in a checkpoint, for comparing
outputs."""
TRIM_TOLERANCE: Final = 1e-5


def compare_files(
    before: Bundle,
    after: Bundle,
    kept: Sequence[int],
    texts: Iterable[str],
) -> None:
    """Raise CompressError if a file's logits have changed for rows whose tokens are all
    kept."""
    new = _new_ids(kept)
    encoder = TextEncoder.from_folder(before.path)
    encoded = encoder.encode(list(islice(texts, PROBED)), before.manifest.max_length)
    rows = [row for row in encoded if new.keys() >= set(row["input_ids"])]
    renumbered = [
        {**row, "input_ids": [new[number] for number in row["input_ids"]]}
        for row in rows
    ]
    for precision, name in BUNDLE_FILES.items():
        if name not in before.manifest.files or not rows:
            continue
        expected = before.logits(rows, precision=precision)
        logits = after.logits(renumbered, precision=precision)
        difference = float(np.abs(expected - logits).max())
        if not difference <= TRIM_TOLERANCE * max(1.0, float(np.abs(expected).max())):
            raise CompressError(
                f"{before.path}: trimming changes the logits of its {precision} file "
                f"by {difference:.2g} for texts of the corpus; nothing was written. "
                "Its graph contains token ids"
            )


def first_output(model: Any, row: Sequence[int]) -> Any:
    """Run a model on one row: logits, or the states of its last layer."""
    ids = torch.tensor([row])
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out = model.eval()(input_ids=ids, **decoder)
    return out["logits"] if "logits" in out else out[0]


def check_outputs(
    model: Any,
    kept: Sequence[int],
    rows: Sequence[Sequence[int]],
    expected: Sequence[Any],
) -> None:
    """Raise CompressError if outputs have changed for rows whose tokens are all kept;
    outputs over the vocabulary are compared for the kept tokens."""
    new = _new_ids(kept)
    for row, before in zip(rows, expected, strict=True):
        if not new.keys() >= set(row):
            continue
        after = first_output(model, [new[number] for number in row])
        wanted = before[..., list(kept)] if after.shape != before.shape else before
        limit = TRIM_TOLERANCE * max(1.0, float(wanted.abs().max()))
        if (
            after.shape != wanted.shape
            or not float((after - wanted).abs().max()) <= limit
        ):
            raise CompressError(
                f"{type(model).__name__}: trimming changes its outputs; nothing was "
                "written. It has tables over the vocabulary that transformers does not "
                "report, or contains token ids"
            )


TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
"""The files of the trimmed tokenizer; older formats (vocab.txt, merges.txt) would still
hold the whole vocabulary."""

TRIM_NOTE: Final = (
    "The vocabulary was trimmed from {before} to {after} tokens, which a corpus uses. "
    "Other texts are encoded with shorter tokens, and may be understood less well."
)


@dataclass(frozen=True)
class Trimmed:
    """The result of trimming.

    path            the folder that was written
    kept            old ids of the kept tokens, ascending: the new id of a token is its
                    index
    before          the former number of tokens
    texts           texts in the corpus; whole: the share of them encoded as before, 1.0
                    if min_count is 1
    bytes           file -> sizes before and after, of weights, tokenizer and ONNX files
    """

    path: Path
    kept: tuple[int, ...]
    before: int
    texts: int
    whole: float
    bytes: dict[str, tuple[int, int]]


def trim_bundle(
    bundle: Bundle,
    texts: Iterable[str],
    out: Path,
    *,
    min_count: int = 1,
    keep: Sequence[str] = (),
) -> Trimmed:
    """Write a bundle without the tokens that occur less than `min_count` times in
    `texts`, which are read more than once; tokens in the texts of `keep` are always
    kept.

    In ONNX files that read ids, only the rows of tables change. Files with the
    tokenizer inside and the report belong to the old vocabulary and are not copied.
    Raises BundleError if `out` exists, CompressError for a corpus that can be read only
    once, a tokenizer that cannot be trimmed, or if logits would change; then nothing is
    written.
    """
    with trimming(bundle, texts, out, min_count=min_count, keep=keep) as (_, trimmed):
        return trimmed


@dataclass(frozen=True)
class SmallModel:
    """A copy of a model and its tokenizer with fewer tokens.

    kept    old ids of the kept tokens, ascending; before: the former number of tokens
    """

    model: Any
    tokenizer: Any
    kept: tuple[int, ...]
    before: int


def trim_copy(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    *,
    frequent: int,
) -> SmallModel:
    """Copy a model and its tokenizer with only the tokens of these texts, the
    `frequent` most frequent ones of the vocabulary, those that they need, and those
    that the model depends on.

    Raises CompressError for a tokenizer that cannot be trimmed.
    """
    before = text_encoder_of(tokenizer)
    config = json.loads(before.backend.to_str())
    used = np.flatnonzero(count_tokens(before, texts)).tolist()
    kept = {*used, *find_frequent(config, frequent), *find_pinned(model)}
    trimmed = TrimmedTokenizer.from_used(config, kept)
    loaded = _load_trimmed(tokenizer, trimmed)
    small = copy.deepcopy(model)
    trim_model(small, trimmed.kept)
    size = before.backend.get_vocab_size()
    return SmallModel(small, loaded, trimmed.kept, size)


@contextmanager
def trimming(
    bundle: Bundle,
    texts: Iterable[str],
    out: Path,
    *,
    min_count: int = 1,
    keep: Sequence[str] = (),
) -> Iterator[tuple[Bundle, Trimmed]]:
    """Yield the bundle of `trim_bundle` in a temporary folder for the caller to finish,
    then rename it to `out`."""
    from compress.models.loader import load_model

    check_new_folder(out)
    model = load_model(bundle.path, bundle.task.auto_class()).model
    with atomic_folder(out) as folder:
        trimmed, tokenizer = _trim(bundle.path, model, texts, min_count, keep)
        save_checkpoint(folder, model, tokenizer, bundle.manifest.max_length)
        for name in ("recipe.yaml", "prompt.yaml"):
            if name in bundle.manifest.files:
                shutil.copyfile(bundle.path / name, folder / name)
        for name in BUNDLE_FILES.values():
            if name in bundle.manifest.files:
                trim_file(bundle.path / name, folder / name, trimmed.kept)
        manifest = Manifest.from_model(
            model, bundle.manifest.max_length, task=bundle.task
        )
        manifest = replace(manifest, threshold=bundle.manifest.threshold)
        limit = TRIM_NOTE.format(before=trimmed.before, after=len(trimmed.kept))
        card = {
            "name": out.name,
            **describe_origin("", bundle.path),
            "limits": (limit,),
        }
        (folder / "README.md").write_text(
            Bundle(folder, manifest).card(card), encoding="utf-8"
        )
        manifest = replace(manifest, files=stamp_files(folder))
        manifest.write(folder)
        compare_files(bundle, Bundle(folder, manifest), trimmed.kept, texts)
        yield (
            Bundle(folder, manifest),
            replace(trimmed, path=out, bytes=_sizes(bundle.path, folder)),
        )


def trim_checkpoint(
    checkpoint: Path,
    texts: Iterable[str],
    out: Path,
    *,
    min_count: int = 1,
    keep: Sequence[str] = (),
) -> Trimmed:
    """Trim a transformers checkpoint as `trim_bundle` does: weights in the model's own
    class, config and tokenizer.

    What sentence-transformers adds to it is copied.
    """
    from compress.models.loader import check_vocabulary, load_as_saved, load_tokenizer

    check_new_folder(out)
    model = load_as_saved(checkpoint).model
    tokenizer = load_tokenizer(checkpoint)
    check_vocabulary(checkpoint, tokenizer, model)
    length = min(PROBED, positions(model) or PROBED)
    rows = [
        row["input_ids"]
        for row in encoder_of(tokenizer).encode(list(islice(texts, PROBED)), length)
    ]
    try:
        expected = [first_output(model, row) for row in rows]
        model.resize_token_embeddings()  # to their own size
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise CompressError(
            f"{checkpoint}: {type(model).__name__} cannot be trimmed "
            f"({first_reason(error)}); expected a model with one table of tokens, "
            "which answers tokens alone, without images or sound"
        ) from error
    with atomic_folder(out) as folder:
        trimmed, tokenizer = _trim(checkpoint, model, texts, min_count, keep)
        check_outputs(model, trimmed.kept, rows, expected)
        source = ModelFolder(checkpoint)
        place = folder / source.encoder.relative_to(checkpoint)
        save_checkpoint(place, model, tokenizer, tokenizer.model_max_length)
        for path in source.module_files():
            copy = folder / path.relative_to(checkpoint)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        sizes = _sizes(checkpoint, folder)
    return replace(trimmed, path=out, bytes=sizes)


def _trim(
    source: Path,
    model: Any,
    texts: Iterable[str],
    min_count: int,
    keep: Sequence[str],
) -> tuple[Trimmed, Any]:
    """Trim the model in place; return the result, without path and sizes, and the
    tokenizer for transformers."""
    from compress.models.loader import load_tokenizer

    if min_count < 1:
        raise CompressError(
            f"min_count {min_count}: expected at least 1; tokens that occur less often "
            "are trimmed"
        )
    if iter(texts) is texts:
        raise CompressError(
            "the corpus is read more than once; expected a list, not an iterator"
        )
    tokenizer = load_tokenizer(source)
    before = text_encoder_of(tokenizer)
    trimmed = trim_tokenizer(
        before,
        texts,
        min_count=min_count,
        # byte-level BPE has one token for a word after a space, another at the start
        keep=chain(
            keep, (f" {each}" for each in keep), _begin(texts, read_prompts(source))
        ),
        pinned=find_pinned(model),
    )
    same = [
        same for _, same in compare_encodings(before, trimmed.encoder(before), texts)
    ]
    if not same:
        raise CompressError(
            "the corpus is empty; expected the texts that the model will read"
        )
    trim_model(model, trimmed.kept)
    size = before.backend.get_vocab_size()
    result = Trimmed(source, trimmed.kept, size, len(same), float(np.mean(same)), {})
    return result, _load_trimmed(tokenizer, trimmed)


def _begin(texts: Iterable[str], prompts: Sequence[str]) -> Iterator[str]:
    """Yield each prompt, alone and before the first word of each text, with which it
    may share a token."""
    yield from prompts
    if prompts:
        firsts = {word for text in texts for word in text.split(maxsplit=1)[:1]}
        yield from map("".join, product(prompts, sorted(firsts)))


def _load_trimmed(tokenizer: Any, trimmed: TrimmedTokenizer) -> Any:
    """Load the trimmed tokenizer with transformers."""
    from compress.models.loader import load_tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            if path.is_file() and path.name not in TOKENIZER_FILES:
                path.unlink()
        content = folder / TOKENIZER_FILES[0]
        content.write_text(
            json.dumps(trimmed.config, ensure_ascii=False), encoding="utf-8"
        )
        loaded = load_tokenizer(folder)
    loaded.chat_template = tokenizer.chat_template
    if loaded.get_vocab() != trimmed.tokenizer.get_vocab(with_added_tokens=True):
        raise CompressError(
            "transformers loads another vocabulary than the trimmed tokenizer has "
            f"({type(loaded).__name__}); nothing was written. Please report it with "
            "the tokenizer.json"
        )
    return loaded


def _sizes(before: Path, after: Path) -> dict[str, tuple[int, int]]:
    names = [
        path.relative_to(after)
        for path in sorted(after.rglob("*"))
        if path.suffix in (".onnx", ".safetensors") or path.name == "tokenizer.json"
    ]
    return {
        str(name): ((before / name).stat().st_size, (after / name).stat().st_size)
        for name in names
        if (before / name).is_file()
    }
