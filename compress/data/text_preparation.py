"""Prepare texts before they are tokenised: choose a prompt and put it before the text.

This is the only place that does so. Training, scoring, prediction, text files and
certificates call it, so that a text gets the same prompt everywhere, and gets it once.
Lower case is not its business: a folder that asks for it is given a tokenizer that
lowers (`models.sentence_folder.EncoderSettings.prepare_tokenizer`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from compress.errors import CompressError, did_you_mean

QUERY: Final = "query"
DOCUMENT_PROMPT: Final = "document"
"""The names of the prompts of texts that search, and of texts that are searched."""


@dataclass(frozen=True)
class TextPreparation:
    """Describe the prompts of a sentence encoder, with the meaning that they have in
    sentence-transformers.

    prompts   name -> what is put before a text
    default   the name of the prompt of texts for which no prompt is named; None: they
              get none

    `query` and `document` can always be named: without an entry in `prompts` they are
    empty. The `default` does not replace them, and neither does `passage` or any other
    name."""

    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    default: str | None = None

    def prompt(self, name: str | None = None) -> str:
        """Return the prompt of this name; None: the default one. Raises CompressError
        for a name that is not there."""
        chosen = self.default if name is None else name
        if chosen is None:
            return ""
        if chosen in self.prompts:
            return self.prompts[chosen]
        if chosen in (QUERY, DOCUMENT_PROMPT):
            return ""
        raise CompressError(
            f"prompt {chosen!r}: this model has no prompt of that "
            f"name.{did_you_mean(chosen, self.names)}"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all prompts."""
        return tuple(dict.fromkeys((QUERY, DOCUMENT_PROMPT, *self.prompts)))

    @property
    def unused(self) -> tuple[str, ...]:
        """Return the names of prompts that no text gets unless they are named."""
        chosen = {QUERY, DOCUMENT_PROMPT, self.default}
        return tuple(
            name
            for name, prompt in self.prompts.items()
            if prompt and name not in chosen
        )

    @property
    def in_turn(self) -> tuple[str, ...]:
        """Return the different prompts that texts of unknown purpose may be given: see
        `prompts_of_rows`."""
        return tuple(dict.fromkeys(self.by_purpose))

    @property
    def by_purpose(self) -> tuple[str, str, str]:
        """Return the default prompt, that of queries, and that of documents."""
        return self.prompt(), self.prompt(QUERY), self.prompt(DOCUMENT_PROMPT)

    def for_pairs(self) -> "TextPreparation":
        """Return the preparation that gives every text, of whatever purpose, the
        default prompt."""
        prompt = self.prompt()
        return TextPreparation({QUERY: prompt, DOCUMENT_PROMPT: prompt}, default=QUERY)

    @property
    def changes_texts(self) -> bool:
        """Check whether any prompt that texts get without naming it is not empty."""
        return any(self.in_turn)


AS_IT_IS: Final = TextPreparation()
"""The preparation of a text that gets no prompt."""


def prepend(prompt: str, texts: Iterable[str]) -> list[str]:
    """Put a prompt before each text."""
    return [prompt + text for text in texts]


def prompts_of_rows(
    preparation: TextPreparation, passages: Sequence[bool], judged: Sequence[bool]
) -> list[str]:
    """Choose the prompt of each text of a split of sentence vectors.

    passages   whether the text is one that queries retrieve
    judged     whether the text is compared with others

    If there are passages, they get the document prompt and all other texts the query
    prompt. Texts that are compared in pairs get the default prompt. Texts alone get
    each of these prompts in turn, since their later use is unknown.
    """
    if any(passages):
        document = preparation.prompt(DOCUMENT_PROMPT)
        query = preparation.prompt(QUERY)
        return [document if is_passage else query for is_passage in passages]
    if any(judged):
        return [preparation.prompt()] * len(passages)
    in_turn = preparation.in_turn
    return [in_turn[row % len(in_turn)] for row in range(len(passages))]


def count_prompt_tokens(prompt_ids: Sequence[int], special: Collection[int]) -> int:
    """Count the tokens that a prompt takes at the beginning of a row, given its own
    row.

    A special token at the end of that row, such as [SEP], comes after the text and is
    not counted; those before the prompt are. `special` holds the ids of all special
    tokens.
    """
    if not prompt_ids:
        return 0
    return len(prompt_ids) - int(prompt_ids[-1] in special)
