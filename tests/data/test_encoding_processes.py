"""Several processes encode text as one does, in the same order, and end with their caller."""

import subprocess
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from compress.data import encoding_processes
from compress.data.corpus import Corpus, encode_corpus
from compress.data.encoder import encoder_of
from compress.data.encoding_processes import encode_documents
from compress.data.sentences import ReadDocument, join_lines, keep_lines, split_lines
from compress.errors import DataError
from tests import tiny

TEXTS = [f"The film is {word}. So {word}!\nThe plot was {word}" for word in tiny.WORDS[:40]] * 5


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Encode elsewhere after some sentences; return the processes that are started."""
    monkeypatch.setattr(encoding_processes, "OWN_CHARACTERS", 1000)
    monkeypatch.setattr(encoding_processes, "TASK_CHARACTERS", 500)
    monkeypatch.setattr(encoding_processes, "count_cores", lambda: 2)
    started = []
    popen = subprocess.Popen

    def start(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*given, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def encode(texts: Iterator[str], read: ReadDocument = join_lines) -> list[tuple[int, list[int]]]:
    batches = encode_documents(enumerate(texts), encoder_of(tiny.tokenizer()), read=read)
    return [
        (number, ids)
        for batch in batches
        for number, (ids, _) in zip(batch.documents.tolist(), batch.tokens.rows(), strict=True)
    ]


@pytest.mark.parametrize("read", [join_lines, keep_lines, split_lines])
def test_processes_encode_as_one_does(
    read: ReadDocument, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = encode(iter(TEXTS), read)
    assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)
    monkeypatch.setattr(encoding_processes, "count_cores", lambda: 1)
    assert encode(iter(TEXTS), read) == found
    assert len(processes) == 2
    assert [number for number, _ in found] == np.repeat(np.arange(len(TEXTS)), 2 if read is split_lines else 3).tolist()


def test_little_text_needs_no_process(processes: list[subprocess.Popen[bytes]]) -> None:
    encode(iter(TEXTS[:5]))
    assert not processes


def test_processes_end_once_enough_is_encoded(processes: list[subprocess.Popen[bytes]]) -> None:
    encoded = encode_corpus(Corpus("films", "films", lambda: iter(TEXTS * 50)), tiny.tokenizer(), 16, limit_tokens=3000)
    assert 3000 <= sum(encoded["length"][:]) < 3016
    assert processes
    assert all(process.poll() is not None for process in processes)


def test_errors_are_those_of_one_process(processes: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(DataError, match=r"U\+D800"):
        encode(iter([*TEXTS, "a film. a \ud800 plot"]))
    with pytest.raises(KeyError):
        encode(text if number < 150 else {}["no"] for number, text in enumerate(TEXTS))
    assert len(processes) == 4
    assert all(process.poll() is not None for process in processes)


def test_a_process_that_is_killed(processes: list[subprocess.Popen[bytes]]) -> None:
    batches = encode_documents(enumerate(TEXTS * 50), encoder_of(tiny.tokenizer()))
    list(islice(batches, 5))
    processes[0].kill()
    with pytest.raises(DataError, match="a process that encodes text exited with status"):
        list(batches)
    assert all(process.poll() is not None for process in processes)
