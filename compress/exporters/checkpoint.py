"""Load the source of an export: a bundle, a run, or a checkpoint with any head or none.

A checkpoint is a folder, an alias or a hub id, as everywhere (`compress.models.checkpoints`): safetensors only, none of
its own code is run, and missing tensors are an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from compress.data.encoder import TokenizerSettings
from compress.data.task import METRICS, Kind, Task
from compress.errors import ExportError, TeacherError
from compress.exporters import manifest
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BundleKind
from compress.models import checkpoints
from compress.models.sentence_folder import MODULES, SentenceFolder, encoder_place
from compress.models.sentence_modules import MODES
from compress.models.sentence_settings import SentenceSettings, set_settings
from compress.slicing.shape import positions

HEADS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "ForSequenceClassification": "classification",
        "ForTokenClassification": "tagging",
        "ForQuestionAnswering": "qa",
        "ForQuestionAnsweringSimple": "qa",
    }
)
HEADLESS: Final = ("Model", "ForMaskedLM", "ForPreTraining")
"""Encoders; the heads of masked language models are dropped."""

GENERATIVE: Final = (
    *("GPT2LMHeadModel", "T5ForConditionalGeneration"),
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
)
SAMPLE: Final = 200
"""Sentences on which an int8 file of embeddings is compared with fp32."""
LONGEST: Final = 512
"""The `max_length` where neither model nor tokenizer has a limit."""


@dataclass(frozen=True)
class Checkpoint:
    """A model in eval mode with its tokenizer.

    task     of a model with a head; sentence: of an encoder without one; a generative model has neither
    origin   licence, language and hub id, where its own card has them: fields of `exporters.card.Card`
    """

    name: str
    model: Any
    tokenizer: Any
    max_length: int
    task: Task | None = None
    sentence: SentenceSettings | None = None
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> BundleKind:
        """Return the kind of bundle that it is written as."""
        if self.task is not None:
            return "task"
        return "generative" if self.sentence is None else "embeddings"

    def write(self, out: Path, *, opset: int = 17) -> Bundle:
        """Write it as a bundle; a model with a task always has our own opset.

        Raises BundleError and ExportError as `Bundle.write` does.
        """
        from compress.exporters import embeddings, generation

        card = {"name": Path(self.name).name or self.name, **self.origin}
        parts: dict[str, Any] = {"tokenizer": self.tokenizer, "max_length": self.max_length, "card": card}
        if self.task is not None:
            return Bundle.write(out, model=self.model, task=self.task, recipe="", **parts)
        if self.sentence is None:
            return generation.write(out, model=self.model, opset=opset, **parts)
        parts |= {"texts": _sentences(), "data": "pydoc"}
        return embeddings.write(out, encoder=self.model, settings=self.sentence, opset=opset, **parts)


Source = Bundle | Checkpoint


def load_source(
    name: str,
    *,
    pair: bool = False,
    pool: str | None = None,
    normalise: bool = False,
    max_length: int | None = None,
    allow_pickle: bool = False,
) -> Source:
    """Load a bundle or a checkpoint.

    pair        a sequence classifier reads two texts
    pool, normalise   the pooling of an encoder whose folder does not define one
    max_length  tokens that a text is truncated to; None: as many as model and tokenizer allow

    Raises BundleError for a damaged bundle, TeacherError for a checkpoint that cannot be loaded as it was saved (such
    as a head whose weights are missing), ExportError for unsupported models and options that do not apply.
    """
    path = Path(name).expanduser()
    if manifest.find_bundle(path, "task"):
        from compress.exporters.session import weights_elsewhere

        _refuse("a bundle defines it", pair=pair, pool=pool, normalise=normalise, max_length=max_length)
        bundle = Bundle.load(path)
        for file in bundle.files().values():
            weights_elsewhere(file)
        return bundle
    if (path / "recipe.yaml").is_file() and not (path / checkpoints.CONFIG).is_file():
        from compress.training.run import continuation

        resume = continuation(path) or "the command that began it, and --resume"
        raise ExportError(f"{path}: a run without a bundle. Continue with: {resume}")

    folder = checkpoints.resolve(name, allow_pickle=allow_pickle)
    origin = checkpoints.describe_origin(name, folder)
    architecture, two_stacks = _architecture(folder)
    head = next((head for head in HEADS if architecture.endswith(head)), None)
    if architecture in GENERATIVE and not (folder / MODULES).is_file():
        _refuse("it is a generative model", pair=pair, pool=pool, normalise=normalise)
        model, tokenizer = _load(name, SentenceFolder.plain(folder), architecture, allow_pickle=allow_pickle)
        return Checkpoint(name, model, tokenizer, _length(name, model, tokenizer, max_length), origin=origin)
    if head and not (folder / MODULES).is_file():
        from compress.models import teacher as teachers

        _refuse(f"its head is {head}", pool=pool, normalise=normalise)
        if pair and HEADS[head] != "classification":
            raise ExportError(f"{name}: pair does not apply to {head}")
        task = _task(folder, HEADS[head], pair=pair)
        teacher = teachers.load(name, folder, task, allow_pickle=allow_pickle)
        if not teacher.trained:
            raise TeacherError(
                f"{name}: the head's outputs are not those of id2label in its config.json; correct id2label"
            )
        length = _length(name, teacher.model, teacher.tokenizer, max_length)
        return Checkpoint(name, teacher.model, teacher.tokenizer, length, task=task, origin=origin)
    _refuse("it has no head", pair=pair)
    _check_encoder(name, folder, architecture, two_stacks)
    source = SentenceFolder.read(folder)
    settings = source.settings
    if pool is not None and pool not in MODES:
        raise ExportError(f"pool: {pool!r}; expected {' or '.join(MODES)}")
    if not settings.embeds and pool is not None:
        from compress.models.teacher import load_config

        width = load_config(source.encoder_path, source.encoder.config_options).hidden_size
        settings = SentenceSettings.pooled(width, pool, normalise=normalise)
    elif pool is not None or normalise:
        raise ExportError(f"{name}: pool and normalise do not apply; {MODULES} defines the pooling")
    model, tokenizer = _load(name, source, "AutoModel", allow_pickle=allow_pickle, settings=settings)
    limit = source.encoder.choose_length(tokenizer, positions(model)) if source.is_listed else None
    length = _length(name, model, tokenizer, max_length or limit)
    settings = replace(settings, max_length=length) if settings.embeds else settings
    return Checkpoint(name, model, tokenizer, length, sentence=settings, origin=origin)


def _check_encoder(name: str, folder: Path, architecture: str, two_stacks: bool) -> None:
    """Raise ExportError for a model without a head that is no plain encoder."""
    is_listed = (folder / MODULES).is_file()
    # as of T5, to which AutoModel would add a decoder of random weights
    if two_stacks or architecture.endswith("EncoderModel"):
        if is_listed:
            raise ExportError(
                f"{name}: {architecture}: vectors of an encoder that belongs to a decoder, as T5's, are not supported; "
                "expected a folder of sentence-transformers with an encoder such as BERT, XLM-RoBERTa or ModernBERT"
            )
        raise ExportError(f"{name}: {architecture}: is not a plain encoder; expected one of {', '.join(GENERATIVE)}")
    if not architecture.endswith(HEADLESS) and not is_listed:
        raise ExportError(
            f"{name}: {architecture}: cannot be exported; expected an encoder, alone or with a head for "
            f"{', '.join(sorted(set(HEADS.values())))}, or one of {', '.join(GENERATIVE)}"
        )


def _architecture(folder: Path) -> tuple[str, bool]:
    """Read from the config the class that was saved, and whether its family has an encoder and a decoder."""
    path = encoder_place(folder) / checkpoints.CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        names = config.get("architectures") or ["Model"]
    except (ValueError, AttributeError) as error:
        raise ExportError(f"{path}: cannot be read ({error}); fetch the checkpoint again") from None
    if config.get("auto_map"):
        raise ExportError(
            f"{path}: the model has code of its own (auto_map), which is never run; it cannot be exported"
        )
    return str(names[0]), bool(config.get("is_encoder_decoder"))


def _task(folder: Path, kind: Kind, *, pair: bool) -> Task:
    """Read the task of a head from the config: the number, names and meaning of its outputs."""
    from compress.models.teacher import load_config

    config = load_config(folder)
    names = tuple(str(config.id2label[index]) for index in range(config.num_labels))
    if kind == "qa":
        return Task("qa", ("question", "context"), "answers", (), METRICS["qa"][0])
    if kind == "tagging":
        return Task("tagging", ("words",), "tags", names, METRICS["tagging"][0])
    text = ("text", "text_pair") if pair else ("text",)
    if config.problem_type == "multi_label_classification":
        return Task("multilabel", text, "labels", names, METRICS["multilabel"][0])
    if config.problem_type == "regression" or len(names) == 1:
        if len(names) != 1:
            raise ExportError(f"{folder}: a regression of {len(names)} numbers; expected one")
        label = "score" if names[0].startswith("LABEL_") else names[0]
        return Task("regression", text, label, (), METRICS["regression"][0])
    return Task(kind, text, "label", names, METRICS[kind][0])


def _load(
    name: str,
    source: SentenceFolder,
    architecture: str,
    *,
    allow_pickle: bool,
    settings: SentenceSettings | None = None,
) -> tuple[Any, Any]:
    """Load a model without a task by its class in transformers, in eval mode, and its tokenizer.

    settings   those of a sentence encoder; one that embeds texts is loaded with its modules

    A pooler that is not in the file is dropped. Raises TeacherError where any other tensor is missing.
    """
    import transformers

    import compress.models.families  # noqa: F401 registers ours with the Auto classes
    from compress.models.heads import task_class
    from compress.models.sentence_encoder import load_tokenizer
    from compress.models.teacher import check_vocabulary, explain_load_errors, load_config

    auto = getattr(transformers, architecture)
    place = source.encoder_path
    config = load_config(place, source.encoder.config_options)
    if settings is not None and settings.embeds:
        auto = task_class("embedding")
        set_settings(config, settings)
        place = source.path
    with explain_load_errors(place):
        tokenizer = load_tokenizer(source)
        model, found = auto.from_pretrained(
            place,
            config=config,
            use_safetensors=None if allow_pickle else True,
            output_loading_info=True,
            **({"trust_remote_code": False} if architecture == "AutoModel" else {}),
        )
    missing = [key for key in found["missing_keys"] if not key.startswith("pooler.")]
    if absent := sorted([*missing, *(key for key, *_ in found["mismatched_keys"])]):
        raise TeacherError(
            f"{name}: {len(absent)} of its tensors are missing, or not of the shape in its config.json, such as "
            f"{absent[0]}: weights and config do not fit together, or the file is incomplete; fetch both again"
        )
    if len(missing) < len(found["missing_keys"]):  # filled with random numbers
        model.pooler = None
    check_vocabulary(source.encoder_path, tokenizer, model)
    return model.eval().requires_grad_(False), tokenizer


def _length(name: str, model: Any, tokenizer: Any, requested: int | None) -> int:
    """Choose the `max_length`. Raises ExportError where the requested one exceeds the model's positions."""
    limit = positions(model)
    if requested is not None:
        if limit is not None and not 0 < requested <= limit:
            raise ExportError(f"{name}: max_length {requested}; this model has {limit} positions")
        return requested
    own = TokenizerSettings.from_tokenizer(tokenizer).model_max_length
    return min(filter(None, (own, limit)), default=LONGEST)


def _refuse(why: str, **options: object) -> None:
    if unused := [name for name, value in options.items() if value not in (None, False)]:
        raise ExportError(f"{', '.join(unused)}: does not apply: {why}")


def _sentences() -> list[str]:
    from compress.data.corpus import load_corpus, split_sentences

    documents = load_corpus("pydoc").documents()
    found = (text for document in documents for text in split_sentences(document) if 20 < len(text) < 200)
    return list(islice(found, SAMPLE))
