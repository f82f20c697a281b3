"""Load teachers safely, and compute the digest of their files."""

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import compress.models.families  # noqa: F401  # registers our families with transformers
from compress import io
from compress.data.task import Task, TaskData
from compress.errors import CompressError, TeacherError
from compress.models.checkpoints import PICKLED, WEIGHTS
from compress.models.heads import ENDINGS, PROBLEMS, output_names, task_class
from compress.models.padding import LAST, align_padding
from compress.models.sentence_encoder import limit_length, load_tokenizer
from compress.models.sentence_folder import MODULES, SentenceFolder, encoder_place

MOST_LAYERS, MOST_OUTPUTS = 1000, 100_000


@dataclass(frozen=True)
class RecordedLogits:
    """The recorded logits or vectors of a teacher that is not a model in memory, by the fingerprint of the split.

    prompt: the prompt it answered, as YAML; parameters: the size of the model, if known
    """

    logits: Mapping[str, NDArray[Any]]
    prompt: str | None = None
    parameters: int | None = None

    def for_split(self, split: Dataset) -> NDArray[Any]:
        return self.logits[split._fingerprint]


@dataclass(frozen=True)
class Teacher:
    """A loaded teacher.

    digest    of weights, config and tokenizer
    trained   whether it came with a head for the task; pickled: whether its weights may be pickled
    recorded  the answers of a teacher that was prompted, or only returns vectors, or whose scores are in the data;
              model and tokenizer are then those that the student begins as, or is cut out of
    """

    name: str
    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    digest: str
    trained: bool
    pickled: bool = False
    recorded: RecordedLogits | None = None


def with_scores(start: Teacher, data: TaskData) -> Teacher:
    """Return a teacher that has recorded the scores in the data's column `teacher`; `start` is what students are cut
    out of."""
    splits = [split for split in (data.train, data.validation, data.test) if split is not None]
    logits = {split._fingerprint: np.asarray(split["teacher"][:], np.float32)[:, None] for split in splits}
    name = f"the scores in {data.name}"
    return replace(start, name=name, digest=data.fingerprint, trained=True, recorded=RecordedLogits(logits))


def identify(folder: Path) -> str:
    """Compute the digest of a model folder's weights, config, tokenizer and modules."""
    tokens = ("tokenizer*.json", "vocab.*", "*.model", "merges.txt", "added_tokens.json", "special_tokens_map.json")
    patterns = (WEIGHTS, PICKLED, "config.json", *tokens, "modules.json", "*_Pooling/*.json", "*_Dense/*")
    return io.hash_files({path for pattern in patterns for path in folder.glob(pattern)})


def has_head(folder: Path, task: Task) -> bool:
    """Return True if the checkpoint was saved with a head for this kind of task, of this many outputs.

    Every plain encoder can embed texts. Raises TeacherError for one with another head, such as a cross-encoder.
    """
    config = _read_config(encoder_place(folder))
    architectures = config.get("architectures") or []
    if task.kind == "embedding":
        others = [name for name in architectures if name.endswith(tuple(ENDINGS.values()))]
        if others and not (folder / MODULES).is_file():
            raise TeacherError(
                f"{folder}: {others[0]} returns scores, as a classifier or a cross-encoder does; expected an encoder "
                "whose tokens are pooled into a vector: a folder of sentence-transformers, or a plain encoder. Vectors "
                "learn from a cross-encoder's scores by --recipe margin-mse-vectors"
            )
        return True
    outputs = len(config.get("id2label") or {0: "", 1: ""})
    return outputs == task.outputs and any(ENDINGS[task.kind] in name for name in architectures)


def is_reranker(folder: Path) -> bool:
    """Return True for a cross-encoder: a checkpoint with a head that gives a text, or two, one number."""
    config = _read_config(encoder_place(folder))
    scores = any(name.endswith(ENDINGS["ranking"]) for name in config.get("architectures") or [])
    return scores and len(config.get("id2label") or {0: "", 1: ""}) == 1 and not (folder / MODULES).is_file()


def _read_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's config.json. Raises TeacherError if it names more outputs than transformers could hold."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise TeacherError(
            f"{folder}: its config.json holds a {type(config).__name__}; expected an object: download it again"
        )
    outputs = config.get("num_labels") or 0
    if not isinstance(outputs, int) or not 0 <= outputs <= MOST_OUTPUTS:
        raise TeacherError(
            f"{folder}: its config.json has num_labels {outputs!r}; expected 0 to {MOST_OUTPUTS:,}: correct it, or "
            "download it again"
        )
    return config


def load(name: str, folder: Path, task: Task, *, allow_pickle: bool = False) -> Teacher:
    """Load tokenizer and model, in eval mode, with a head for `task`: its own, or a new one to fine-tune.

    Raises TeacherError if the weights cannot be read or do not fit the config, or the tokenizer does not fit the model.
    """
    source = SentenceFolder.read(folder) if task.kind == "embedding" else SentenceFolder.plain(folder)
    with explain_load_errors(folder):
        trained = has_head(folder, task)
        tokenizer = load_tokenizer(source)
        config = load_config(source.encoder_path, source.encoder.config_options)
        align_padding(tokenizer, config)
        labels = dict(enumerate(output_names(task)))
        if not trained or all(str(label).startswith("LABEL_") for label in config.id2label.values()):
            config.id2label, config.label2id = labels, {label: i for i, label in labels.items()}
        config.problem_type = PROBLEMS.get(task.kind)
        model, info = task_class(task.kind).from_pretrained(
            folder,
            config=config,
            use_safetensors=None if allow_pickle else True,
            ignore_mismatched_sizes=not trained,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if getattr(config, "summary_type", "first") in LAST and hasattr(model, "sequence_summary"):
        tokenizer.padding_side = "left"  # also for whoever loads the bundle
    missing = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    inside = f"{model.base_model_prefix}."  # transformers draws what is missing; only a new head and pooler may be
    if bad := sorted(key for key in missing if trained or (key.startswith(inside) and ".pooler." not in key)):
        raise TeacherError(
            f"{folder}: {len(bad)} of its tensors are missing, or not of the shape in its config.json, such as "
            f"{bad[0]}: weights and config do not belong together, or the file is incomplete; download both again"
        )
    check_vocabulary(folder, tokenizer, model)
    if task.pair or task.kind == "qa":
        _check_types(folder, tokenizer, config)
    if trained:
        _align_labels(model, task, name)
    if task.kind == "embedding":
        limit_length(model, source, tokenizer)
    return Teacher(name, folder, model.eval().requires_grad_(False), tokenizer, identify(folder), trained, allow_pickle)


@contextmanager
def explain_load_errors(folder: Path) -> Iterator[None]:
    """Raise what libraries raise for a broken folder as TeacherError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise TeacherError(f"{folder}: its weights are damaged or cut short ({error}); download them again") from error
    except pickle.UnpicklingError as error:
        raise TeacherError(
            f"{folder}: its pickled weights are damaged, or hold more than tensors, which could run code and is not "
            "loaded; save them as safetensors"
        ) from error
    except CompressError:
        raise
    except Exception as error:  # a value of a wrong type or size may fail anywhere in the libraries
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        if "custom code" in reason:
            raise TeacherError(
                f"{folder}: its model or tokenizer needs code of its own, which does not run here; expected a family "
                "that is part of transformers. Choose another checkpoint"
            ) from error
        raise TeacherError(
            f"{folder}: cannot be loaded: {reason}. Its config, tokenizer or weights are damaged, or do not belong "
            "together; download them again"
        ) from error


def load_config(folder: Path, options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Load a checkpoint's config, without settings that choose code to download or run.

    options   settings that replace those of the file

    Raises TeacherError for a config that cannot be read, describes quantised weights, or has an impossible size, and
    for an option that it does not have.
    """
    with explain_load_errors(folder):
        _read_config(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)
        if unknown := sorted(name for name in options if not hasattr(config, name)):
            raise TeacherError(
                f"{folder}: {unknown[0]!r} is set for its config beside it, and {config.model_type} has no such setting"
            )
        if getattr(config, "quantization_config", None) is not None:
            raise TeacherError(
                f"{folder}: its config.json has a quantization_config; expected float weights, which are quantised "
                "at the end. Give the checkpoint that this one was quantised from"
            )
        layers = getattr(config, "num_hidden_layers", 0)
        if not isinstance(layers, int) or not 0 <= layers <= MOST_LAYERS:
            raise TeacherError(
                f"{folder}: its config.json has {layers!r} layers; expected 0 to {MOST_LAYERS:,}: correct it, or "
                "download it again"
            )
        config._attn_implementation = config._experts_implementation = None  # let the library choose
    return config


def check_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise TeacherError for a tokenizer without tokens, or with tokens that the model does not have."""
    if not isinstance(tokenizer.model_max_length, int | float):
        raise TeacherError(
            f"{folder}: model_max_length {tokenizer.model_max_length!r} of its tokenizer is not a number: correct it "
            "in tokenizer_config.json, or download it again"
        )
    known = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    if len(tokenizer.get_vocab()) <= len(set(tokenizer.all_special_tokens)):  # the library invents one
        raise TeacherError(
            f"{folder}: has no tokenizer; expected tokenizer.json, or the family's own file; download all its files, "
            "or save its tokenizer there"
        )
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= known:
        raise TeacherError(
            f"{folder}: its tokenizer makes token ids up to {highest}, the model knows {known}: they do not belong "
            "together; use the tokenizer that the model was trained with"
        )


def _check_types(folder: Path, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raise TeacherError for a tokenizer that gives a pair of texts token types that the model does not have."""
    known, highest = getattr(config, "type_vocab_size", 0), max(tokenizer("a", "a").get("token_type_ids", [0]))
    if known and highest >= known:  # without any, the model does not read them
        raise TeacherError(
            f"{folder}: its tokenizer gives the second text of a pair the type {highest}, and the model knows {known} "
            "types: they do not belong together; use the tokenizer that the model was trained with"
        )


def _align_labels(model: PreTrainedModel, task: Task, name: str) -> None:
    """Reorder the head's outputs to match the data's labels. Raises TeacherError if their names differ."""
    if not task.labels:
        return
    names: dict[Any, Any] = dict(model.config.id2label or {})
    theirs = [str(names[i]) for i in range(task.outputs)]
    if theirs == list(task.labels):
        return
    folded = {label.casefold().replace("-", "_"): i for i, label in enumerate(theirs)}
    order = [folded.get(label.casefold().replace("-", "_")) for label in task.labels]
    if None in order or len(set(order)) != len(order):
        raise TeacherError(
            f"teacher {name}: its labels are {', '.join(theirs)}, the data's are {', '.join(task.labels)}: they cannot "
            "be matched. Correct id2label in its config.json, or rename the data's labels"
        )
    head = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == task.outputs][-1]
    head.weight.data = head.weight.data[order]
    if head.bias is not None:
        head.bias.data = head.bias.data[order]
    model.config.id2label = dict(enumerate(task.labels))
    model.config.label2id = {label: i for i, label in enumerate(task.labels)}
