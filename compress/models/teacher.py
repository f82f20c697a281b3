"""Load a teacher safely, and identify its files."""

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import compress.models.families  # noqa: F401  # checkpoints of the families of ours can be loaded
from compress import io as digest
from compress.data.task import Task
from compress.errors import CompressError, TeacherError
from compress.models.checkpoints import PICKLED, WEIGHTS
from compress.models.heads import ENDINGS, PROBLEMS, output_names, task_class
from compress.models.pooling import MODULES

MOST_LAYERS, MOST_OUTPUTS = 1000, 100_000


@dataclass(frozen=True)
class RecordedLogits:
    """Hold the answers of a teacher that is no encoder here: logits, or vectors, of the rows of a split, by the split's
    fingerprint.

    prompt: the prompt it was asked with, as YAML; parameters: the size of the model, where that is known
    """

    logits: Mapping[str, NDArray[Any]]
    prompt: str | None = None
    parameters: int | None = None

    def for_split(self, split: Dataset) -> NDArray[Any]:
        return self.logits[split._fingerprint]


@dataclass(frozen=True)
class Teacher:
    """Hold a teacher as it was loaded.

    digest    of weights, config and tokenizer
    trained   whether it came with a head for the task; pickled: whether its weights may be pickled
    recorded  the answers of a teacher that was prompted, or gives vectors alone; model and tokenizer are then what the
              student begins as, or is cut out of
    """

    name: str
    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    digest: str
    trained: bool
    pickled: bool = False
    recorded: RecordedLogits | None = None


def identify(folder: Path) -> str:
    """Compute the digest of a model folder's weights, config, tokenizer and modules."""
    tokens = ("tokenizer*.json", "vocab.*", "*.model", "merges.txt", "added_tokens.json", "special_tokens_map.json")
    patterns = (*WEIGHTS, *PICKLED, "config.json", *tokens, "modules.json", "*_Pooling/*.json", "*_Dense/*")
    return digest.hash_files({path for pattern in patterns for path in folder.glob(pattern)})


def has_head(folder: Path, task: Task) -> bool:
    """Check that the checkpoint was saved with a head for this kind of task, of this many outputs.

    Every encoder gives vectors as it is. Raises TeacherError for a model with another head, such as a cross-encoder.
    """
    config = _settings(folder)
    if task.kind == "embedding":
        others = [name for name in config.get("architectures") or [] if name.endswith(tuple(ENDINGS.values()))]
        if others and not (folder / MODULES).is_file():
            raise TeacherError(
                f"{folder}: {others[0]} gives scores, as a classifier or a cross-encoder does; expected an encoder, "
                "whose tokens are pooled into a vector: a folder of sentence-transformers, or a plain encoder's"
            )
        return True
    heads = any(ENDINGS[task.kind] in name for name in config.get("architectures") or [])
    outputs = len(config.get("id2label") or {0: "", 1: ""})
    return heads and outputs == task.outputs


def _settings(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's config.json as it is.

    Raises TeacherError where the library would make names for more outputs than there is memory for.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise TeacherError(
            f"{folder}: its config.json holds a {type(config).__name__}, where settings were expected: fetch it again"
        )
    outputs = config.get("num_labels") or 0
    if not isinstance(outputs, int) or not 0 <= outputs <= MOST_OUTPUTS:
        raise TeacherError(
            f"{folder}: its config.json says num_labels {outputs!r}; expected 0 to {MOST_OUTPUTS:,}: mend it, or fetch "
            "it again"
        )
    return config


def load(name: str, folder: Path, task: Task, *, allow_pickle: bool = False) -> Teacher:
    """Load tokenizer and model, in eval mode, with a head for `task`: its own, or a new one to be fine-tuned.

    Raises TeacherError for weights that cannot be read, or are not the config's, and for a tokenizer that does not
    belong to the model.
    """
    with explain_load_errors(folder):
        trained = has_head(folder, task)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config = load_config(folder)
        if tokenizer.pad_token is None:  # GPT-2's; its classifier looks for the last token that is no padding
            tokenizer.pad_token = tokenizer.eos_token
            config.pad_token_id = tokenizer.pad_token_id
        if config.model_type == "xlnet" and config.summary_type == "last":  # which has to be a token, not padding
            tokenizer.padding_side = "left"
        labels = dict(enumerate(output_names(task)))
        if not trained or all(str(label).startswith("LABEL_") for label in config.id2label.values()):
            config.id2label, config.label2id = labels, {label: i for i, label in labels.items()}
        config.problem_type = PROBLEMS.get(task.kind)
        model, found = task_class(task.kind).from_pretrained(
            folder,
            config=config,
            use_safetensors=None if allow_pickle else True,
            ignore_mismatched_sizes=not trained,
            trust_remote_code=False,
            output_loading_info=True,
        )
    _complete(folder, model, [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])], trained)
    check_vocabulary(folder, tokenizer, model)
    if trained:
        _align_labels(model, task, name)
    return Teacher(name, folder, model.eval().requires_grad_(False), tokenizer, identify(folder), trained, allow_pickle)


@contextmanager
def explain_load_errors(folder: Path) -> Iterator[None]:
    """Turn what libraries raise on a broken folder into a TeacherError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise TeacherError(f"{folder}: its weights are damaged or cut short ({error}); fetch them again") from error
    except pickle.UnpicklingError as error:
        raise TeacherError(
            f"{folder}: its pickled weights are damaged, or hold more than tensors and are not loaded, as that could "
            "run code; save them as safetensors"
        ) from error
    except CompressError:
        raise
    except Exception as error:  # a value of a wrong type or size ends anywhere in the libraries, and in any way
        said = " ".join(str(error).split())[:400] or type(error).__name__
        if "custom code" in said:
            raise TeacherError(
                f"{folder}: its model or tokenizer is code of its own, which is not run here; expected one of a family "
                "that transformers has. Give another checkpoint"
            ) from error
        raise TeacherError(
            f"{folder}: cannot be loaded: {said}. Its config, tokenizer or weights are damaged, or do not belong "
            "together; fetch them again"
        ) from error


def load_config(folder: Path) -> Any:
    """Load a checkpoint's config without what is no property of the model, and would fetch or choose code to run.

    Raises TeacherError for a config that cannot be read, is of quantised weights, or of a size that no model has.
    """
    with explain_load_errors(folder):
        _settings(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise TeacherError(
                f"{folder}: its config.json has a quantization_config; expected weights in float, which are quantised "
                "here at the end. Give the checkpoint that this one was quantised from"
            )
        layers = getattr(config, "num_hidden_layers", 0)
        if not isinstance(layers, int) or not 0 <= layers <= MOST_LAYERS:
            raise TeacherError(
                f"{folder}: its config.json says {layers!r} layers; expected 0 to {MOST_LAYERS:,}: mend it, or "
                "fetch it again"
            )
        config._attn_implementation = config._experts_implementation = None  # kernels: the library's choice, not theirs
    return config


def _complete(folder: Path, model: PreTrainedModel, absent: list[str], trained: bool) -> None:
    """Refuse missing tensors, which the library fills with random numbers, but for those of a new head and pooler."""
    inside = f"{model.base_model_prefix}."
    bad = sorted(key for key in absent if trained or (key.startswith(inside) and ".pooler." not in key))
    if bad:
        raise TeacherError(
            f"{folder}: {len(bad)} of its tensors are missing, or not of the shape its config.json says, such as "
            f"{bad[0]}: weights and config do not belong together, or the file is not whole; fetch both again"
        )


def check_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise TeacherError for a tokenizer that makes no tokens, or some that the model does not know."""
    if not isinstance(tokenizer.model_max_length, int | float):
        raise TeacherError(
            f"{folder}: model_max_length {tokenizer.model_max_length!r} of its tokenizer is no number: mend it in "
            "tokenizer_config.json, or fetch it again"
        )
    known = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    if len(tokenizer.get_vocab()) <= len(set(tokenizer.all_special_tokens)):  # what the library makes of no files
        raise TeacherError(
            f"{folder}: has no tokenizer; expected tokenizer.json, or the family's own file, in it; fetch it whole, or "
            "save its tokenizer there"
        )
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= known:
        raise TeacherError(
            f"{folder}: its tokenizer makes token ids up to {highest}, the model knows {known}: they do not belong "
            "together; use the tokenizer the model was trained with"
        )


def _align_labels(model: PreTrainedModel, task: Task, name: str) -> None:
    """Reorder the head's outputs to the data's labels where both name them alike; refuse other names."""
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
            f"teacher {name}: its labels are {', '.join(theirs)}, the data's are {', '.join(task.labels)}: which is "
            "which cannot be told. Correct id2label in its config.json, or rename the data's labels"
        )
    head = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == task.outputs][-1]
    head.weight.data = head.weight.data[order]
    if head.bias is not None:
        head.bias.data = head.bias.data[order]
    model.config.id2label = dict(enumerate(task.labels))
    model.config.label2id = {label: i for i, label in enumerate(task.labels)}
