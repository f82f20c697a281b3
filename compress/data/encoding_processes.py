"""Encode much text with several processes, in an order that does not depend on their
number.

Each process runs this module: it reads from its standard input a tokenizer, then
documents, and answers with their tokens. They are separate programs, not copies of this
process: a forked copy would lack its threads, and a spawned one would run its main
module again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from tokenizers import Tokenizer

from compress.data.encoder import Encoder, TextEncoder
from compress.data.sentences import (
    ReadDocument,
    RunningTextEncoder,
    SentenceTokens,
    join_lines,
    read_texts,
)
from compress.errors import CompressError, DataError
from compress.machine import count_cores

OWN_CHARACTERS: Final = 8_000_000
"""Characters of a corpus that this process encodes before it starts others, which takes
a second."""
TASK_CHARACTERS: Final = 500_000
"""Characters of the documents that are sent to a process at once."""
MOST_PROCESSES: Final = 4
"""Processes that encode as fast as one can read."""

NumberedDocument = tuple[int, str]
Documents = list[NumberedDocument]


def encode_documents(
    documents: Iterable[NumberedDocument],
    encoder: Encoder,
    *,
    read: ReadDocument = join_lines,
) -> Iterator[SentenceTokens]:
    """Encode the sentences of numbered documents, about SENTENCES_PER_CALL at once;
    some may have no tokens.

    read   makes texts of a document: `sentences.join_lines`, `keep_lines` or
           `split_lines`

    Raises DataError if a process ends before its work is done.
    """
    numbered = iter(documents)
    batches = read_texts(_take_documents(numbered, OWN_CHARACTERS), read)
    first = next(batches, [])
    sentences = RunningTextEncoder.from_encoder(encoder, first)
    for texts in chain([first], batches):
        yield SentenceTokens.from_texts(texts, sentences)
    count = min(count_cores(), MOST_PROCESSES)
    if isinstance(encoder, TextEncoder) and count > 1:
        yield from _encode_elsewhere(numbered, sentences, encoder, count, read)
    # documents that no other process has taken
    for texts in read_texts(numbered, read):
        yield SentenceTokens.from_texts(texts, sentences)


def _take_documents(
    numbered: Iterator[NumberedDocument],
    characters: int,
) -> Iterator[NumberedDocument]:
    """Yield documents until they have `characters` characters in all."""
    taken = 0
    while taken < characters and (each := next(numbered, None)) is not None:
        yield each
        taken += len(each[1])


def _encode_elsewhere(
    numbered: Iterator[NumberedDocument],
    sentences: RunningTextEncoder,
    encoder: TextEncoder,
    count: int,
    read: ReadDocument,
) -> Iterator[SentenceTokens]:
    """Send documents to processes, each when one is idle, and yield the answers in the
    order of the documents."""
    task = list(_take_documents(numbered, TASK_CHARACTERS))
    if not task:
        return
    backend = encoder.backend.to_str()
    start = (backend, encoder.settings, encoder.name, sentences.ends_tokens, read)
    idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()

    def ask(task: Documents) -> list[SentenceTokens]:
        process = idle.get()
        try:
            return _ask(process, task)
        finally:
            idle.put(process)

    waiting: deque[Future[list[SentenceTokens]]] = deque()
    with ThreadPoolExecutor(count) as threads, _started(count) as processes:
        for process in processes:
            _send(process, start)
            idle.put(process)
        while task or waiting:
            if task:
                waiting.append(threads.submit(ask, task))
                task = list(_take_documents(numbered, TASK_CHARACTERS))
            if len(waiting) > 2 * count or not task:
                yield from waiting.popleft().result()


@contextmanager
def _started(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start processes, and end them."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    # an interruption is for this process, which then ends them
                    start_new_session=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _send(process: subprocess.Popen[bytes], value: object) -> None:
    assert process.stdin is not None, "it is a pipe"
    pickle.dump(value, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
    process.stdin.flush()


def _ask(process: subprocess.Popen[bytes], task: Documents) -> list[SentenceTokens]:
    """Send documents to a process, and wait for its answer."""
    assert process.stdout is not None, "it is a pipe"
    try:
        _send(process, task)
        answer = pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        raise DataError(
            f"a process that encodes text exited with status {process.poll()}; "
            "expected the tokens of its documents. Check that memory is free, and run "
            "the command again: finished parts are kept"
        ) from error
    if isinstance(answer, CompressError):
        raise answer
    tokens: list[SentenceTokens] = answer
    return tokens


def serve() -> None:
    """Answer one process, until it ends."""
    source = sys.stdin.buffer
    sink = sys.stdout.buffer
    sys.stdout = sys.stderr
    backend, settings, name, ends_tokens, read = pickle.load(source)
    encoder = TextEncoder.from_backend(Tokenizer.from_str(backend), settings, name)
    sentences = RunningTextEncoder(encoder, ends_tokens)
    while True:
        try:
            documents = pickle.load(source)
        except EOFError:
            return
        batches = read_texts(documents, read)
        answer: object
        try:
            answer = [SentenceTokens.from_texts(texts, sentences) for texts in batches]
        except CompressError as error:
            answer = error
        pickle.dump(answer, sink, protocol=pickle.HIGHEST_PROTOCOL)
        sink.flush()


if __name__ == "__main__":
    serve()
