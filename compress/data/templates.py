"""Hold the special tokens that a tokenizer puts around texts, without torch: tables of
texts are read without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from compress.data.fast_tokens import Surroundings
from compress.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Template:
    """Hold the special tokens before, between and after texts, and the token types of
    both; None if rows have no token types."""

    ids: tuple[list[int], ...]
    types: tuple[list[int], ...] | None
    text_types: tuple[int, ...] | None

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, texts: int) -> Template:
        """Derive the template from the encoding of a word, alone or as a pair. Raises
        DataError."""
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer(*["a"] * texts)
        ids = whole["input_ids"]
        types = whole.get("token_type_ids")
        starts = []
        end = 0
        cuts = []
        for _ in range(texts):
            start = next(
                (at for at in range(end, len(ids)) if ids[at : at + len(bare)] == bare),
                None,
            )
            if start is None or not bare:
                raise DataError(
                    f"{type(tokenizer).__name__}: cannot find its special tokens "
                    f"around {texts} text(s): 'a' is {bare} without and {ids} with "
                    "them. Choose a tokenizer that knows the letter a."
                )
            cuts.append((end, start))
            starts.append(start)
            end = start + len(bare)
        cuts.append((end, len(ids)))
        around = tuple(ids[i:j] for i, j in cuts)
        if types is None:
            return cls(around, None, None)
        return cls(
            around,
            tuple(types[i:j] for i, j in cuts),
            tuple(types[at] for at in starts),
        )

    def fill(self, *texts: Sequence[int]) -> dict[str, list[int]]:
        """Make a row of texts: {input_ids, token_type_ids (if the tokenizer makes
        them)}."""
        row = {"input_ids": _interleave(self.ids, texts)}
        if self.types is not None and self.text_types is not None:
            types = [
                [type_] * len(text)
                for type_, text in zip(self.text_types, texts, strict=True)
            ]
            row["token_type_ids"] = _interleave(self.types, types)
        return row

    @property
    def size(self) -> int:
        """Count the special tokens."""
        return sum(map(len, self.ids))

    def surroundings(self) -> Surroundings:
        """Return the special tokens around one text; without token types, they are
        0."""
        types = self.types or tuple([0] * len(ids) for ids in self.ids)
        special = [
            tuple(zip(*pair, strict=True)) for pair in zip(self.ids, types, strict=True)
        ]
        return Surroundings(special[0], special[1], (self.text_types or (0,))[0])


def _interleave(
    around: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[int]:
    parts = chain.from_iterable(zip(around[:-1], texts, strict=True))
    return [*chain.from_iterable(parts), *around[-1]]
