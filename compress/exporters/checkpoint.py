"""Load the source of an export: a bundle, a run, or a checkpoint with any head or none.

A checkpoint is a folder, an alias or a hub id, as everywhere
(`compress.models.checkpoints`): safetensors only, none of its own code is run, and
missing tensors are an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from compress.data.encoder import TokenizerSettings
from compress.data.task import Task
from compress.errors import ExportError, TeacherError
from compress.exporters import manifest
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BundleKind
from compress.kinds import Kind, find
from compress.models import checkpoints
from compress.models.folder import CONFIG, MODULES, ModelFolder
from compress.models.sentence_folder import SentenceFolder
from compress.models.sentence_modules import MODES
from compress.models.sentence_settings import SentenceSettings, set_settings
from compress.slicing.shape import positions

if TYPE_CHECKING:
    from compress.models.fit import New
    from compress.models.saved_head import SavedHead

TASK_HEADS: Final[tuple[Kind, ...]] = ("classification", "tagging", "qa")
"""Kinds of task, one for each head that can be exported."""
GENERATIVE: Final = (
    *("GPT2LMHeadModel", "T5ForConditionalGeneration"),
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
)
READ_AS_ENCODERS: Final = (
    "XLNetLMHeadModel",
    "OpenAIGPTLMHeadModel",
    "CTRLLMHeadModel",
)
"""Language models that are exported as encoders of tokens, without their head; other
causal ones are refused."""
UNLIMITED_LENGTH: Final = 512
"""The `max_length` if neither model nor tokenizer has a limit."""


@dataclass(frozen=True)
class Checkpoint:
    """A model in eval mode with its tokenizer.

    task     what the model answers; None for a generative model, and for an encoder
             that returns a vector for each token
    kind     of the bundle that it is written as
    leaves_out_prompts   whether vectors leave the tokens of prompts out
    origin   licence, language and hub id, if its own card has them: fields of
             `exporters.card.Card`
    """

    name: str
    model: Any
    tokenizer: Any
    max_length: int
    task: Task | None = None
    kind: BundleKind = "task"
    origin: Mapping[str, Any] = field(default_factory=dict)
    leaves_out_prompts: bool = False

    def write(self, out: Path, *, opset: int = 17) -> Bundle:
        """Write it as a bundle; a model with a task always gets our default opset.

        Raises BundleError and ExportError as `Bundle.write` does.
        """
        from compress.exporters import generation, token_states

        card = {"name": Path(self.name).name or self.name, **self.origin}
        parts: dict[str, Any] = {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "max_length": self.max_length,
            "card": card,
        }
        if self.task is not None:
            return Bundle.write(out, task=self.task, recipe="", **parts)
        module = generation if self.kind == "generative" else token_states
        return module.write(out, opset=opset, **parts)


ExportSource = Bundle | Checkpoint


def resolve_run(name: str) -> str:
    """Return the checkpoint of a run that has no bundle, or a name that is no run's
    folder as it is. Raises ExportError for a run that has not finished."""
    path = Path(name).expanduser()
    if not (path / "recipe.yaml").is_file() or (path / CONFIG).is_file():
        return name
    from compress.training.run import advise, find_checkpoint

    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise ExportError(f"{path}: a run without a bundle. {advise(path)}")
    return str(checkpoint)


def load_source(
    name: str,
    *,
    pair: bool = False,
    pool: str | None = None,
    normalise: bool = False,
    max_length: int | None = None,
    allow_pickle: bool = False,
) -> ExportSource:
    """Load a bundle or a checkpoint.

    pair        whether a sequence classifier reads two texts, if its files do not say
                so
    pool, normalise   the pooling of an encoder whose folder does not define one
    max_length  tokens that a text is truncated to; None: as many as model and tokenizer
                allow

    Raises BundleError for a damaged bundle, TeacherError for a checkpoint that cannot
    be loaded as it was saved (such as a head whose weights are missing), ExportError
    for unsupported models and options that do not apply."""
    path = Path(name).expanduser()
    if manifest.find_bundle(path, "task"):
        from compress.exporters.session import weights_elsewhere

        _refuse(
            "a bundle defines it",
            pair=pair,
            pool=pool,
            normalise=normalise,
            max_length=max_length,
        )
        bundle = Bundle.load(path)
        for file in bundle.files().values():
            weights_elsewhere(file)
        return bundle
    name = resolve_run(name)
    folder = checkpoints.resolve(name, allow_pickle=allow_pickle)
    from compress.models.loader import load_config
    from compress.models.saved_head import find_head

    source = ModelFolder(folder)
    config = load_config(folder)
    loader = _Loader(name, folder, config, max_length, allow_pickle)
    head = find_head(source, config, allow_pickle=allow_pickle)
    if head.name in GENERATIVE and source.kind != "sentence_encoder":
        _refuse("it is a generative model", pair=pair, pool=pool, normalise=normalise)
        return loader.load_generative(head.name)
    if head.part == "task" and source.kind != "sentence_encoder":
        _refuse(f"it has a head, {head.name}", pool=pool, normalise=normalise)
        return loader.load_with_task(_task(source, config, head, pair=pair))
    _refuse("it has no head", pair=pair)
    _check_encoder(source, config, head)
    settings = SentenceFolder.read(folder).settings
    if pool is not None and pool not in MODES:
        raise ExportError(f"pool: {pool!r}; expected {' or '.join(MODES)}")
    if not settings.embeds and pool is not None:
        settings = SentenceSettings.pooled(
            config.hidden_size, pool, normalise=normalise
        )
    elif pool is not None or normalise:
        raise ExportError(
            f"{name}: pool and normalise do not apply; {MODULES} defines the pooling"
        )
    return loader.load_encoder(settings)


def _check_encoder(source: ModelFolder, config: Any, head: "SavedHead") -> None:
    """Raise ExportError for a checkpoint that is more than an encoder, as only its
    token vectors would be exported."""
    from compress.models.saved_head import explain_unknown_head

    is_listed = source.kind == "sentence_encoder"
    # such as T5's, to which AutoModel would add a decoder with random weights
    if config.is_encoder_decoder or head.name.endswith("EncoderModel"):
        if is_listed:
            raise ExportError(
                f"{source.path}: {head.name}: vectors of an encoder that belongs to a "
                "decoder, as T5's, are not supported; expected a folder of "
                "sentence-transformers with an encoder such as BERT, XLM-RoBERTa or "
                "ModernBERT"
            )
        raise ExportError(
            f"{source.path}: {head.name}: is not a plain encoder; expected one of "
            f"{', '.join(GENERATIVE)}"
        )
    # its modules say which output of the encoder is used, whatever class was saved
    if is_listed:
        return
    if head.part == "unknown":
        raise ExportError(explain_unknown_head(source, head))
    generates = (
        "AutoModelForCausalLM" in head.autos
        and "AutoModelForMaskedLM" not in head.autos
    )
    if head.part == "other" or (generates and head.name not in READ_AS_ENCODERS):
        raise ExportError(
            f"{source.path}: {head.name}: cannot be exported; expected an encoder, "
            f"alone or with a head for {', '.join(TASK_HEADS)}, or one of "
            f"{', '.join(GENERATIVE)}"
        )


@dataclass(frozen=True)
class _Loader:
    """Load a checkpoint as one of its kinds. The fields are arguments of
    `load_source`."""

    name: str
    folder: Path
    config: Any
    max_length: int | None
    allow_pickle: bool

    def load_with_task(self, task: Task) -> Checkpoint:
        """Load a checkpoint with a head. Raises TeacherError if the head is not the one
        that config.json describes."""
        from compress.models import teacher as teachers

        teacher = teachers.load(
            self.name, self.folder, task, allow_pickle=self.allow_pickle
        )
        if not teacher.trained:
            raise TeacherError(
                f"{self.name}: the head's outputs do not match id2label in its "
                "config.json; correct id2label"
            )
        return self._describe(teacher.model, teacher.tokenizer, task=task)

    def load_generative(self, architecture: str) -> Checkpoint:
        import transformers

        model, tokenizer = self._load(getattr(transformers, architecture), "nothing")
        return self._describe(model, tokenizer, kind="generative")

    def load_encoder(self, settings: SentenceSettings) -> Checkpoint:
        """Load an encoder: with modules, as a sentence encoder; otherwise unchanged,
        without a pooler that its files lack."""
        import transformers

        source = SentenceFolder.read(self.folder)
        auto = transformers.AutoModel
        if settings.embeds:
            auto = find("embedding").auto_class()
            set_settings(self.config, settings)
        model, tokenizer = self._load(auto, "pooler")
        limit = None
        if source.is_listed:
            limit = source.encoder.choose_length(tokenizer, positions(model))
        if not settings.embeds:
            return self._describe(model, tokenizer, limit, kind="encoder")
        task = find("embedding").from_settings(settings)
        found = self._describe(model, tokenizer, limit, task=task)
        return replace(found, leaves_out_prompts=settings.leaves_out_prompts)

    def _load(self, auto: Any, new: "New") -> tuple[Any, Any]:
        """Load the model and its tokenizer. Raises TeacherError."""
        from compress.models.loader import check_vocabulary, load_model, load_tokenizer
        from compress.models.padding import hide_padding

        tokenizer = load_tokenizer(self.folder)
        loaded = load_model(
            self.folder, auto, self.config, new=new, allow_pickle=self.allow_pickle
        )
        loaded.remove_new_pooler()
        hide_padding(loaded.model)
        check_vocabulary(self.folder, tokenizer, loaded.model)
        return loaded.model, tokenizer

    def _describe(
        self,
        model: Any,
        tokenizer: Any,
        limit: int | None = None,
        *,
        task: Task | None = None,
        kind: BundleKind = "task",
    ) -> Checkpoint:
        """Choose the `max_length`: the requested one, else `limit`, else as many tokens
        as model and tokenizer allow.

        Raises ExportError if the requested one exceeds the model's positions.
        """
        longest = positions(model)
        length = limit if self.max_length is None else self.max_length
        if length is None:
            own = TokenizerSettings.from_tokenizer(tokenizer).model_max_length
            length = min(filter(None, (own, longest)), default=UNLIMITED_LENGTH)
        elif longest is not None and not 0 < length <= longest:
            raise ExportError(
                f"{self.name}: max_length {length}; this model has {longest} positions"
            )
        origin = checkpoints.describe_origin(self.name, self.folder)
        return Checkpoint(self.name, model, tokenizer, length, task, kind, origin)


def _task(source: ModelFolder, config: Any, head: "SavedHead", *, pair: bool) -> Task:
    """Read the task of a head from the config: the number, names and meaning of its
    outputs. Raises ExportError."""
    kind, *others = [kind for kind in TASK_HEADS if head.serves(kind)]
    if others:
        raise ExportError(
            f"{source.where}: architectures names no class of transformers, and the "
            f"tensors of the head fit {head.name}; expected one of them: name it in "
            "architectures"
        )
    task: type[Task] = find(kind)
    if pair and task.tokenwise:
        raise ExportError(f"{source.path}: pair does not apply to {head.name}")
    text = ("text", "text_pair") if pair or source.reads_pairs else ("text",)
    return task.from_checkpoint(source, config.problem_type, text)


def _refuse(why: str, **options: object) -> None:
    if unused := [
        name for name, value in options.items() if value not in (None, False)
    ]:
        raise ExportError(f"{', '.join(unused)}: does not apply: {why}")
