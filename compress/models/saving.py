"""Save weights, config and tokenizer so that every version of transformers from 4 on loads them."""

import copy
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def save_checkpoint(folder: Path, model: Any, tokenizer: Any, max_length: int) -> None:
    """Save model and tokenizer, which stay as they are.

    The tokenizer's file cuts texts to `max_length` tokens, and makes what this model reads: a student may be of another
    family than the teacher whose tokenizer it has.
    """
    with _no_progress_bars():
        model.save_pretrained(folder)
        save_tokenizer(folder, tokenizer, max_length)
    read = [name for name in tokenizer.model_input_names if name in inspect.signature(model.forward).parameters]
    _as_transformers_4_reads(folder / "tokenizer_config.json", read)


def save_tokenizer(folder: Path, tokenizer: Any, max_length: int | None = None) -> None:
    """Save a tokenizer, which stays as it is, in the same bytes whatever it was called with before."""
    words = copy.deepcopy(tokenizer)
    if words.is_fast:  # its backend carries the padding and truncation of its last call into the file
        words.backend_tokenizer.no_padding()
        words.backend_tokenizer.no_truncation()
    if max_length is not None:
        words.model_max_length = max_length
    words.save_pretrained(folder)


def _as_transformers_4_reads(path: Path, inputs: list[str]) -> None:
    """Words of transformers 5 that 4.x fails on, in the words that both read; and no trace of the machine."""
    config = json.loads(path.read_text(encoding="utf-8")) | {"model_input_names": inputs}
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    kept = {key: value for key, value in config.items() if key not in ("is_local", "local_files_only")}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
