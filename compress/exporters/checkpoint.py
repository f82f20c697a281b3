"""What `compress export` is given: a bundle, a run, or a checkpoint with any head or none -> what can be shipped.

A checkpoint is a folder, an alias or a hub id, as everywhere (`compress.models.checkpoints`): safetensors only, no code
of its own is ever run, and tensors that are missing are never made up.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from compress.data.task import Kind, Task
from compress.errors import ExportError
from compress.exporters import manifest
from compress.exporters.artifact import Bundle
from compress.exporters.embeddings import MODULES, POOLS, Pool, Reading
from compress.models import checkpoints

if TYPE_CHECKING:
    from compress.exporters.embeddings import Embeddings
    from compress.exporters.generation import Generative

HEADS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "ForSequenceClassification": "classification",
        "ForTokenClassification": "tagging",
        "ForQuestionAnswering": "qa",
        "ForQuestionAnsweringSimple": "qa",
    }
)
HEADLESS: Final = ("Model", "ForMaskedLM", "ForPreTraining")
"""Encoders: what a language model's head predicts is of no use on a device."""

WRITERS: Final = ("GPT2LMHeadModel", "T5ForConditionalGeneration")
SAMPLE: Final = 200
"""Sentences on which an int8 file of embeddings is compared with fp32."""


@dataclass(frozen=True)
class Shipped:
    """A bundle that is there already."""

    name: str
    bundle: Bundle

    def write(self, out: Path) -> Bundle:
        """The bundle in another folder."""
        return self.bundle.copied(out)


@dataclass(frozen=True)
class Headed:
    """A model with a head for a task, in eval mode, with its tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    task: Task
    max_length: int

    def write(self, out: Path) -> Bundle:
        """A bundle of it. Raises BundleError and ExportError as `Bundle.write` does."""
        return Bundle.write(
            out,
            model=self.model,
            tokenizer=self.tokenizer,
            task=self.task,
            max_length=self.max_length,
            recipe="",
            card={"name": Path(self.name).name or self.name},
        )


@dataclass(frozen=True)
class Encoder:
    """An encoder, and how its tokens become a vector, where that is known."""

    name: str
    model: Any
    tokenizer: Any
    reading: Reading
    max_length: int

    def write(self, out: Path, *, opset: int = 17, texts: Sequence[str] = ()) -> "Embeddings":
        """A folder of embeddings; `texts` (none: sentences of Python's documentation) show what int8 changes."""
        from compress.exporters import embeddings

        return embeddings.write(
            out,
            encoder=self.model,
            tokenizer=self.tokenizer,
            reading=self.reading,
            max_length=self.max_length,
            name=Path(self.name).name or self.name,
            texts=texts or _sentences(),
            data="given texts" if texts else "pydoc",
            opset=opset,
        )


@dataclass(frozen=True)
class Writer:
    """A model that writes text, GPT-2 or T5."""

    name: str
    model: Any
    tokenizer: Any
    max_length: int

    def write(self, out: Path, *, opset: int = 17) -> "Generative":
        """A folder of its encoder and decoder."""
        from compress.exporters import generation

        return generation.write(
            out, model=self.model, tokenizer=self.tokenizer, max_length=self.max_length, name=self.name, opset=opset
        )


Source = Shipped | Headed | Encoder | Writer


def source(
    name: str,
    *,
    pair: bool = False,
    pool: Pool | None = None,
    normalise: bool = False,
    max_length: int | None = None,
    allow_pickle: bool = False,
) -> Source:
    """What `name` is: see Shipped, Headed, Encoder, Writer; each can be written to a folder.

    pair        of a sequence classifier: it reads two texts
    pool, normalise   of an encoder whose folder does not say how a text becomes one vector
    max_length  tokens a text is cut to; none: what model and tokenizer allow

    Raises BundleError for a damaged bundle, TeacherError for a checkpoint that cannot be loaded as it was saved (a
    head that is not in the file is no head), ExportError for a model that is none of these and for options that do
    not apply.
    """
    if bundle := _bundle(Path(name).expanduser()):
        _unused("a bundle has that written in it", pair=pair, pool=pool, normalise=normalise, max_length=max_length)
        return Shipped(name, bundle)
    from compress.exporters import transformers_model

    folder = checkpoints.resolve(name, allow_pickle=allow_pickle)
    kind, two_stacks = _architecture(folder)
    if kind in WRITERS:
        _unused("it writes text", pair=pair, pool=pool, normalise=normalise)
        model, tokenizer = transformers_model.writer(name, folder, kind, allow_pickle=allow_pickle)
        return Writer(name, model, tokenizer, transformers_model.length(name, model, tokenizer, max_length))
    head = next((head for head in HEADS if kind.endswith(head)), None)
    if head and not (folder / MODULES).is_file():
        _unused(f"its head is {head}", pool=pool, normalise=normalise)
        if pair and HEADS[head] != "classification":
            raise ExportError(f"{name}: pair does not apply: {head} reads what it always reads")
        task = transformers_model.task(folder, HEADS[head], pair=pair)
        model, tokenizer = transformers_model.headed(name, folder, task, allow_pickle=allow_pickle)
        return Headed(name, model, tokenizer, task, transformers_model.length(name, model, tokenizer, max_length))
    _unused("it has no head", pair=pair)
    if two_stacks or kind.endswith("EncoderModel"):  # as T5's, which AutoModel gives a decoder of random numbers
        raise ExportError(f"{name}: {kind}: is no encoder alone; expected one of {', '.join(WRITERS)}")
    if not kind.endswith(HEADLESS):
        raise ExportError(
            f"{name}: {kind}: cannot be exported; expected an encoder, alone or with a head for "
            f"{', '.join(sorted(set(HEADS.values())))}, or one of {', '.join(WRITERS)}"
        )
    reading = Reading.of(folder)
    if reading.pool is None and pool is not None:
        reading = replace(reading, pool=_known(pool), normalise=normalise)
    elif pool is not None or normalise:
        raise ExportError(f"{name}: pool and normalise do not apply; {MODULES} says how to pool: {reading.pool}")
    model, tokenizer = transformers_model.encoder(name, folder, allow_pickle=allow_pickle)
    length = transformers_model.length(name, model, tokenizer, max_length or reading.max_length)
    return Encoder(name, model, tokenizer, reading, length)


def _bundle(folder: Path) -> Bundle | None:
    """The bundle of a bundle's or of a run's folder, none of whose files has others outside it read."""
    from compress.exporters.session import weights_elsewhere

    if manifest.located(folder):
        bundle = Bundle.load(folder)
        for file in bundle.files().values():
            weights_elsewhere(file)
        return bundle
    if (folder / "recipe.yaml").is_file() and not (folder / checkpoints.CONFIG).is_file():
        raise ExportError(f"{folder}: a run without a bundle: finish it with `compress distill --resume`")
    return None


def _architecture(folder: Path) -> tuple[str, bool]:
    """The class that was saved, as the config says, and whether its family has an encoder and a decoder."""
    path = folder / checkpoints.CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        names = config.get("architectures") or ["Model"]
    except (ValueError, AttributeError) as error:
        raise ExportError(f"{path}: cannot be read ({error}); fetch the checkpoint again") from None
    if config.get("auto_map"):
        raise ExportError(
            f"{path}: the model brings code of its own (auto_map), which is never run; it is not exported"
        )
    return str(names[0]), bool(config.get("is_encoder_decoder"))


def _known(pool: str) -> Pool:
    for known in POOLS:
        if pool == known:
            return known
    raise ExportError(f"pool: {pool!r}; expected {' or '.join(POOLS)}")


def _unused(why: str, **options: object) -> None:
    if given := [name for name, value in options.items() if value not in (None, False)]:
        raise ExportError(f"{', '.join(given)}: does not apply: {why}")


def _sentences() -> list[str]:
    from compress.data.corpus import load_corpus
    from compress.data.sentences import split_sentences

    documents = load_corpus("pydoc").documents()
    found = (text for document in documents for text in split_sentences(document) if 20 < len(text) < 200)
    return list(islice(found, SAMPLE))
