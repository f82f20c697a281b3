"""Data sets of the Hugging Face hub, or of its local cache when the hub cannot be reached."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from compress.data.records import from_dataset
from compress.data.rows import Rows
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import DatasetDict

SUITES: Final = {"glue": "nyu-mll/glue", "super_glue": "aps/super_glue", "tweet_eval": "cardiffnlp/tweet_eval"}
"""Data sets of many tasks, which `suite/task` names as the papers do."""

ANSWER_SECONDS = 5.0
"""How long the hub may take to answer at all; without this check its client retries for minutes."""


def splits(source: str) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """The splits of a hub data set by the hub's names, and notes. DataError within 30 s when it cannot be had."""
    path, configuration = _address(source)
    notes: tuple[str, ...] = ()
    offline = not answers()
    with _cache_only(offline):
        loaded = _load(source, path, configuration, offline=offline)
    if offline:
        notes = (f"the hub was not reached: {source} comes from the local cache",)
    return {str(name): from_dataset(f"{source} [{name}]", split) for name, split in loaded.items()}, notes


def _address(source: str) -> tuple[str, str | None]:
    name, _, configuration = source.partition(":")
    suite, _, task = name.partition("/")
    if suite in SUITES and task:
        return SUITES[suite], task
    return name, configuration or None


def answers() -> bool:
    """Whether the hub, or the mirror that HF_ENDPOINT names, answers: one request, through the proxies in force.

    HF_HUB_OFFLINE is a no. Worth asking first: the hub's clients wait for an answer for minutes, or for ever.
    """
    from datasets import config

    if config.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(config.HF_ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # a proxy's own "bad gateway" is no answer of the hub
    except (OSError, http.client.HTTPException):
        return False


@contextmanager
def _cache_only(offline: bool) -> Iterator[None]:
    """`datasets` reads this switch from the environment once, when imported; here it holds for one call."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _load(source: str, path: str, configuration: str | None, *, offline: bool) -> DatasetDict:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(path, configuration)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        said = str(error).strip().splitlines()[-1].rstrip(".")
        reason = f"the hub cannot be reached, nor does its local cache have it ({said})" if offline else said
        raise DataError(
            f"{source}: {reason}. Instead: a folder with train.tsv (csv, jsonl, parquet), the embedded set 'intents', "
            "or a hub cache that has it (HF_HOME names the cache)."
        ) from error
