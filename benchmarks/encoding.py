"""How fast is a corpus encoded and written in blocks, beside `encode_batch_fast` of `tokenizers`?

    python -m benchmarks.encoding TOKENIZER.json TEXT.txt [--tokens 15000000] [--rounds 3]

The two take turns; each round prints millions of tokens a second of time, and of processor time over all processes.
The corpus is read, divided into sentences, encoded, packed into blocks of 128 tokens and written to a new cache. Only
the first megabytes of the text are given to `tokenizers`, as lines.
"""

import os
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.common import make_parser
from compress.data.corpus import encode_corpus, load_corpus

LINES = 20_000
"""Lines that `tokenizers` encodes in a round."""


def measure(name: str, encode: Callable[[], int]) -> str:
    """Say how many tokens a second a function encodes, which returns their number."""
    used = os.times()
    began = time.perf_counter()
    count = encode()
    seconds = time.perf_counter() - began
    processor = sum(os.times()[:4]) - sum(used[:4])
    return f"{name}: {count / seconds / 1e6:.2f} M tokens/s, {count / processor / 1e6:.2f} per second of a core"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=15_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    backend: Any = Tokenizer.from_file(given.tokenizer)
    backend.no_truncation()
    backend.no_padding()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=given.tokenizer, pad_token=backend.id_to_token(0))
    corpus = load_corpus(given.text)
    found = (line for text in corpus.documents() for line in text.splitlines() if line.strip())
    lines = list(islice(found, LINES))

    def with_tokenizers() -> int:
        return sum(map(len, backend.encode_batch_fast(lines, add_special_tokens=False)))

    def with_blocks() -> int:
        with tempfile.TemporaryDirectory() as home:
            os.environ["COMPRESS_HOME"] = home
            rows = encode_corpus(corpus, tokenizer, 128, limit_tokens=given.tokens)
            count = sum(rows["length"][:])
            size = sum(path.stat().st_size for path in Path(home).rglob("*.arrow"))
            print(f"{count:,} tokens in {len(rows):,} blocks, {size / count:.2f} bytes a token")
            return count

    for _ in range(given.rounds):
        print(measure("tokenizers", with_tokenizers))
        print(measure("compress", with_blocks))


if __name__ == "__main__":
    main()
