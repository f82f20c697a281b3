"""Encode texts as rows of tokens, exactly as a checkpoint's own tokenizer does.

Training, scoring, prediction, export, trimming and the graph of a text file all get
their rows here, so that a model is scored on what it answers. It uses `tokenizers`
alone: prediction imports neither torch nor transformers. A checkpoint's tokenizer is
the one that transformers' AutoTokenizer makes of its files. A bundle holds the result:
tokenizer.json, and in tokenizer_config.json the settings that `TokenizerSettings`
names. docs/what-is-read.md lists every setting.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE

from compress import io
from compress.data import windows
from compress.data.fast_tokens import FastTokens, TokenArrays, open_fast
from compress.data.windows import QuestionWindow, Side, Window, WordWindow
from compress.errors import BundleError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = str | tuple[str, str]
TextRow = dict[str, list[int]]
"""input_ids, attention_mask, and token_type_ids if the tokenizer makes them."""

TOKENIZER_JSON: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
UNLIMITED: Final = 10**6
"""A tokenizer without a limit has a `model_max_length` above this, in tokens."""
LONGEST_FIRST: Final = "longest_first"
MANY_TEXTS: Final = 256
"""Texts in a call at which a fast library repays the tenth of a second that opening it
takes."""
STRATEGIES: Final = (LONGEST_FIRST, "only_first", "only_second")
"""The ways in which `tokenizers` can truncate a pair of texts."""


@dataclass(frozen=True)
class TokenizerSettings:
    """Hold what decides the tokens of a text besides tokenizer.json.

    truncation_side       the end of a long text that is cut off
    truncation_strategy   how a pair of texts is truncated
    token_types           whether rows have token types: `model_input_names` contains
                          `token_type_ids`
    split_special_tokens  whether the name of a special token in a text is read as
                          ordinary text
    pad_token_id          None without a padding token
    special_ids           of the tokens that the tokenizer's config declares to be
                          special, in order; a tokenizer.json may have more
    model_max_length      the most tokens of a row; None without a limit
    clean_up              whether a decoded text loses the spaces before punctuation
    """

    truncation_side: Side = "right"
    truncation_strategy: str = LONGEST_FIRST
    token_types: bool = True
    split_special_tokens: bool = False
    pad_token_id: int | None = None
    special_ids: tuple[int, ...] = ()
    model_max_length: int | None = None
    clean_up: bool = False

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> TokenizerSettings:
        """Read the settings of a tokenizer of transformers, which knows the defaults of
        its class."""
        strategy = tokenizer.init_kwargs.get("truncation_strategy")
        side = tokenizer.truncation_side
        return cls(
            **_check_truncation(side, strategy, tokenizer_name(tokenizer)),
            token_types="token_type_ids" in tokenizer.model_input_names,
            split_special_tokens=bool(tokenizer.split_special_tokens),
            pad_token_id=tokenizer.pad_token_id,
            special_ids=tuple(sorted({*tokenizer.all_special_ids})),
            model_max_length=_read_limit(tokenizer.model_max_length),
            clean_up=_cleans_up(
                vars(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
            ),
        )

    @classmethod
    def from_folder(cls, folder: Path, backend: Tokenizer) -> TokenizerSettings:
        """Read the settings of a bundle from its tokenizer_config.json. Raises
        BundleError."""
        path = folder / TOKENIZER_CONFIG
        try:
            config = io.parse_json(path)
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{path}: cannot be read ({error}); copy the model again"
            ) from None
        if not isinstance(config, dict):
            raise BundleError(
                f"{path}: holds a {type(config).__name__}; expected an object: copy "
                "the model again"
            )
        stored: Mapping[str, Any] = backend.truncation or {}
        strategy = config.get("truncation_strategy")
        if strategy is None:
            strategy = stored.get("strategy")
        side = config.get("truncation_side", stored.get("direction", "right"))
        padding = config.get("pad_token")
        if isinstance(padding, dict):
            padding = padding.get("content")
        declared = json.dumps(
            [config[name] for name in config if re.search("_tokens?$", name)]
        )
        return cls(
            **_check_truncation(side, strategy, str(path)),
            token_types="token_type_ids"
            in config.get("model_input_names", ["token_type_ids"]),
            split_special_tokens=bool(config.get("split_special_tokens", False)),
            pad_token_id=None if padding is None else backend.token_to_id(padding),
            special_ids=tuple(
                number
                for number, token in sorted(backend.get_added_tokens_decoder().items())
                if json.dumps(token.content) in declared
            ),
            model_max_length=_read_limit(config.get("model_max_length")),
            clean_up=_cleans_up(config, backend),
        )

    def to_config(self) -> dict[str, Any]:
        """Return settings for tokenizer_config.json that transformers leaves out if
        they are the default of a class or were changed after loading."""
        return {
            "truncation_side": self.truncation_side,
            "split_special_tokens": self.split_special_tokens,
        }


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Name a tokenizer in errors by its folder, or else by its class."""
    return str(tokenizer.name_or_path or type(tokenizer).__name__)


def _check_truncation(side: Any, strategy: Any, where: str) -> dict[str, Any]:
    """Return the side and strategy of truncation by name. Raises DataError for unknown
    ones."""
    chosen = {
        "truncation_side": side,
        "truncation_strategy": LONGEST_FIRST if strategy is None else strategy,
    }
    for (name, value), known in zip(
        chosen.items(), (get_args(Side), STRATEGIES), strict=True
    ):
        if value not in known:
            raise DataError(
                f"{where}: {name} is {value!r}; expected {' or '.join(known)}: correct "
                f"{TOKENIZER_CONFIG}"
            )
    return chosen


def _read_limit(length: float | None) -> int | None:
    return None if length is None or length > UNLIMITED else int(length)


def _cleans_up(settings: Mapping[str, Any], backend: Tokenizer | None) -> bool:
    """Check whether transformers cleans up a decoded text: not for BPE, whose tokens
    have spaces, unless forced to."""
    if not settings.get("clean_up_tokenization_spaces"):
        return False
    if backend is not None and isinstance(backend.model, BPE):
        return bool(
            settings.get(
                "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
            )
        )
    return True


@dataclass(frozen=True)
class Encoder:
    """Turn texts into rows of tokens: a `TextEncoder`, or a `SlowEncoder`.

    name  of the tokenizer, for errors
    """

    settings: TokenizerSettings
    name: str

    def encode(
        self,
        texts: Sequence[Text],
        max_length: int | None = None,
    ) -> list[TextRow]:
        """Encode texts, or pairs of texts, as rows of at most `max_length` tokens,
        special tokens included.

        A long text is cut off at the end that `truncation_side` names; of a pair, the
        longer text is. A text without tokens (empty, and the tokenizer adds none)
        becomes a padding token: models cannot run on nothing. Raises DataError for a
        `max_length` without room for a text, and for input that is not text, such as a
        lone surrogate.
        """
        raise NotImplementedError

    def arrays(
        self,
        texts: Sequence[Text],
        max_length: int | None = None,
    ) -> TokenArrays:
        """Encode texts as `encode` does, as arrays instead of a list for each row."""
        rows = self.encode(texts, max_length)
        types = [row["token_type_ids"] for row in rows if "token_type_ids" in row]
        with_types = self.settings.token_types
        ids = [row["input_ids"] for row in rows]
        return TokenArrays.from_rows(ids, types if with_types else None)

    def piece_arrays(self, texts: Sequence[str]) -> TokenArrays:
        """Return what `pieces` does, as arrays; without token types."""
        return TokenArrays.from_rows(self.pieces(texts))

    def questions(
        self,
        questions: Sequence[str],
        contexts: Sequence[str],
        max_length: int,
    ) -> list[list[QuestionWindow]]:
        """Encode questions, each with windows of its context: see
        `windows.read_questions`. Raises DataError if the tokenizer reports no
        offsets."""
        raise self._lacks_places("questions")

    def words(
        self,
        sentences: Sequence[Sequence[str]],
        max_length: int,
    ) -> list[list[WordWindow]]:
        """Encode windows of words: see `windows.read_words`. Raises DataError if the
        tokenizer reports no offsets."""
        raise self._lacks_places("words")

    def row(self, window: Window) -> TextRow:
        """Make the row of a window."""
        return self._make_row(window.ids, window.types)

    def pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of whole texts, without special tokens."""
        raise NotImplementedError

    def encodings(self, texts: Sequence[str]) -> list[Encoding] | None:
        """Encode whole texts, without special tokens, with the characters that each
        token comes from; None if the tokenizer does not report them."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Hash everything that determines the tokens of a text."""
        raise NotImplementedError

    def _make_row(self, ids: list[int], types: list[int]) -> TextRow:
        if not ids:
            if self.settings.pad_token_id is None:
                raise DataError(
                    f"{self.name}: a text has no tokens, and the tokenizer has no "
                    "padding token to stand for it. Leave empty texts out, or set "
                    f"pad_token in its {TOKENIZER_CONFIG}"
                )
            ids = [self.settings.pad_token_id]
            types = [0]
        row = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if self.settings.token_types:
            row["token_type_ids"] = types
        return row

    def _check_room(self, max_length: int, special: int, pair: bool) -> None:
        if max_length - special < 1 + pair:
            texts = "two texts" if pair else "a text"
            raise DataError(
                f"{self.name}: max_length {max_length} has no room for {texts} next to "
                f"{special} special tokens; expected at least {special + 1 + pair}. "
                "Raise it; if none was given, it is model_max_length of "
                f"{TOKENIZER_CONFIG}"
            )

    def _lacks_places(self, what: str) -> DataError:
        return DataError(
            f"{self.name}: this tokenizer does not report which characters its tokens "
            f"come from, which {what} need; expected a fast tokenizer, as "
            "AutoTokenizer returns for all common models."
        )


@dataclass(frozen=True)
class TextEncoder(Encoder):
    """Encode with the backend of a fast tokenizer; from several threads, if all encode
    for the same task and length."""

    backend: Tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> TextEncoder:
        """Open the tokenizer of a bundle. Raises BundleError where its files are
        missing or cannot be read."""
        path = folder / TOKENIZER_JSON
        if not path.is_file():
            raise BundleError(
                f"{path}: no such file; expected the tokenizer of the model"
            )
        try:
            backend: Any = Tokenizer.from_file(str(path))
        except Exception as error:
            # the library raises plain Exception for a file that it cannot read
            if type(error) is not Exception:
                raise
            raise BundleError(
                f"{path}: cannot be read as a tokenizer ({error}); copy the model again"
            ) from None
        return cls.from_backend(
            backend, TokenizerSettings.from_folder(folder, backend), str(folder)
        )

    @classmethod
    def from_backend(
        cls,
        backend: Tokenizer,
        settings: TokenizerSettings = TokenizerSettings(),
        name: str = TOKENIZER_JSON,
    ) -> TextEncoder:
        """Encode with a backend; its own padding and truncation settings are ignored.

        Raises DataError for a backend that samples the tokens of a text (BPE dropout).
        """
        if dropout := getattr(backend.model, "dropout", None):
            raise DataError(
                f"{name}: model.dropout of its {TOKENIZER_JSON} is {dropout:g}, so the "
                "tokens of a text change from call to call; expected null: correct it"
            )
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = settings.split_special_tokens
        return cls(settings, name, backend)

    def encode(
        self,
        texts: Sequence[Text],
        max_length: int | None = None,
    ) -> list[TextRow]:
        if not texts:
            return []
        if (fast := self._encode_fast(texts, max_length)) is not None:
            return [self._make_row(*row) for row in fast.rows()]
        self.truncate(max_length, pair=not isinstance(texts[0], str))
        with _explain_wrong_texts(texts):
            found = self.backend.encode_batch_fast(list(texts))
        return [self._make_row(each.ids, each.type_ids) for each in found]

    def arrays(
        self,
        texts: Sequence[Text],
        max_length: int | None = None,
    ) -> TokenArrays:
        fast = self._encode_fast(texts, max_length)
        if fast is None or (fast.lengths == 0).any():
            return super().arrays(texts, max_length)
        return fast if self.settings.token_types else replace(fast, types=None)

    def piece_arrays(self, texts: Sequence[str]) -> TokenArrays:
        if len(texts) >= MANY_TEXTS and self.fast is not None:
            with _explain_wrong_texts(texts):
                fast = self.fast.encode(texts, special=False)
            if fast is not None:
                return fast
        return super().piece_arrays(texts)

    @cached_property
    def fast(self) -> FastTokens | None:
        """A fast library with the same rows, if there is one."""
        return open_fast(self.backend, self.name)

    def _encode_fast(
        self, texts: Sequence[Text], max_length: int | None
    ) -> TokenArrays | None:
        if (
            len(texts) < MANY_TEXTS
            or not isinstance(texts[0], str)
            or self.fast is None
        ):
            return None
        if max_length is not None:
            self.check_truncation(max_length, pair=False)
        side = self.settings.truncation_side
        with _explain_wrong_texts(texts):
            return self.fast.encode(texts, max_length, side=side)

    def tokens(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the tokens of whole texts, special tokens included."""
        self.backend.no_truncation()
        with _explain_wrong_texts(texts):
            found = self.backend.encode_batch_fast(list(texts))
        return [each.tokens for each in found]

    def pieces(self, texts: Sequence[str]) -> list[list[int]]:
        self.backend.no_truncation()
        with _explain_wrong_texts(texts):
            found = self.backend.encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        return [each.ids for each in found]

    def encodings(self, texts: Sequence[str]) -> list[Encoding]:
        self.backend.no_truncation()
        with _explain_wrong_texts(texts):
            return self.backend.encode_batch(list(texts), add_special_tokens=False)

    def questions(
        self,
        questions: Sequence[str],
        contexts: Sequence[str],
        max_length: int,
    ) -> list[list[QuestionWindow]]:
        self.backend.no_truncation()
        side = self.settings.truncation_side
        with _explain_wrong_texts([*questions, *contexts]):
            return windows.read_questions(
                self.backend, questions, contexts, max_length, side=side
            )

    def words(
        self,
        sentences: Sequence[Sequence[str]],
        max_length: int,
    ) -> list[list[WordWindow]]:
        self.backend.no_truncation()
        with _explain_wrong_texts([word for words in sentences for word in words]):
            return windows.read_words(
                self.backend, sentences, max_length, side=self.settings.truncation_side
            )

    def fingerprint(self) -> str:
        self.backend.no_truncation()
        return _hash(self.backend.to_str(), self.settings)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens, as the tokenizer's own
        `decode` does."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=True)
        return clean_up(text) if self.settings.clean_up else text

    def check_truncation(self, max_length: int, *, pair: bool) -> None:
        """Raise DataError for a length without room for a text, and for a pair that is
        not truncated as transformers truncates one."""
        special = self.backend.num_special_tokens_to_add(pair)
        self._check_room(max_length, special, pair)
        if pair and self.settings.truncation_strategy != LONGEST_FIRST:
            raise DataError(
                f"{self.name}: truncation_strategy of its tokenizer is "
                f"{self.settings.truncation_strategy}; transformers ignores it and "
                "cuts the longer text of a pair, so the model may have been trained "
                f"with either. Expected {LONGEST_FIRST}: if it is right, set it in "
                f"{TOKENIZER_CONFIG}, or as truncation.strategy in {TOKENIZER_JSON}"
            )

    def truncate(self, max_length: int | None, *, pair: bool) -> None:
        """Truncate rows to this length from now on. Raises DataError as
        `check_truncation` does."""
        if max_length is None:
            self.backend.no_truncation()
            return
        self.check_truncation(max_length, pair=pair)
        wanted: dict[str, Any] = {
            "max_length": max_length,
            "stride": 0,
            "strategy": LONGEST_FIRST,
            "direction": self.settings.truncation_side,
        }
        if self.backend.truncation != wanted:  # another thread may be using it
            self.backend.enable_truncation(**wanted)


@dataclass(frozen=True)
class SlowEncoder(Encoder):
    """Encode with a tokenizer of transformers that is not a file of `tokenizers`: one
    written in Python (XLM, FlauBERT, CANINE), or one whose class has its own way of
    encoding. It cannot be saved in a bundle."""

    tokenizer: PreTrainedTokenizerBase

    def encode(
        self,
        texts: Sequence[Text],
        max_length: int | None = None,
    ) -> list[TextRow]:
        if not texts:
            return []
        columns = (
            [list(texts)]
            if isinstance(texts[0], str)
            else list(map(list, zip(*texts, strict=True)))
        )
        if max_length is not None:
            special = self.tokenizer.num_special_tokens_to_add(pair=len(columns) > 1)
            self._check_room(max_length, special, len(columns) > 1)
        with _explain_wrong_texts(texts):
            found = self.tokenizer(
                *columns,
                truncation=max_length is not None,
                max_length=max_length,
                padding=False,
                return_token_type_ids=True,
                verbose=False,
            )
        rows = zip(found["input_ids"], found["token_type_ids"], strict=True)
        return [self._make_row(ids, types) for ids, types in rows]

    def pieces(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        with _explain_wrong_texts(texts):
            found = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return list(found["input_ids"])

    def encodings(self, texts: Sequence[str]) -> list[Encoding] | None:
        if not self.tokenizer.is_fast:
            return None
        with _explain_wrong_texts(texts):
            return self.tokenizer(
                list(texts), add_special_tokens=False, verbose=False
            ).encodings

    def fingerprint(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            files = io.hash_files(
                path for path in Path(folder).rglob("*") if path.is_file()
            )
        return _hash(f"{type(self.tokenizer).__name__} {files}", self.settings)


def encoder_of(tokenizer: PreTrainedTokenizerBase | Encoder) -> Encoder:
    """Return the encoder of a tokenizer of transformers, which shares its backend; an
    encoder is returned as it is."""
    if isinstance(tokenizer, Encoder):
        return tokenizer
    settings = TokenizerSettings.from_tokenizer(tokenizer)
    name = tokenizer_name(tokenizer)
    if not tokenizer.is_fast or _calls_its_own(type(tokenizer)):
        return SlowEncoder(settings, name, tokenizer)
    return TextEncoder.from_backend(tokenizer.backend_tokenizer, settings, name)


def text_encoder_of(tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    """Return the encoder of a tokenizer of transformers. Raises DataError for one that
    is not fast."""
    encoder = encoder_of(tokenizer)
    if not isinstance(encoder, TextEncoder):
        raise DataError(
            f"{tokenizer_name(tokenizer)}: {type(tokenizer).__name__} has no "
            f"{TOKENIZER_JSON} form; expected a fast tokenizer, as AutoTokenizer "
            "returns for all common models"
        )
    return encoder


def _calls_its_own(kind: type) -> bool:
    """Check whether the class of one family changes how texts are encoded, instead of
    its backend."""
    for method in ("__call__", "_encode_plus"):
        owner = next((each for each in kind.__mro__ if method in vars(each)), None)
        if owner is not None and owner.__module__.startswith("transformers.models."):
            return True
    return False


def check_saved(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise BundleError unless the tokenizer saved in a folder encodes some difficult
    texts as transformers does."""
    saved = TextEncoder.from_folder(folder)
    special = " ".join(
        [*tokenizer.all_special_tokens, *map(str.lower, tokenizer.all_special_tokens)]
    )
    texts = (
        "It's a GOOD film, isn't it?",
        "  Zoë's café \n\t in Ångström,  1,000.50 % ",
        "東京 ﬁne ½ 🙂👍🏽 e\u0301 \u200b",
        special,
        "x".join(special.split(" ")),
        "a b c d " * 600,
    )
    limit = saved.settings.model_max_length
    for text in texts:
        try:
            expected = tokenizer(
                text,
                truncation=limit is not None,
                max_length=limit,
                padding=False,
                verbose=False,
            )
        except (TypeError, ValueError, AssertionError) as error:  # layouts, tables
            raise BundleError(
                f"{tokenizer_name(tokenizer)}: {type(tokenizer).__name__} cannot "
                f"encode a text by itself ({' '.join(str(error).split())[:200]}); "
                "choose a model with another tokenizer"
            ) from error
        if not expected["input_ids"]:
            continue
        (row,) = saved.encode([text], limit)
        if any(row[name] != list(expected[name]) for name in row if name in expected):
            raise BundleError(
                f"{tokenizer_name(tokenizer)}: {type(tokenizer).__name__} encodes "
                f"{text!r:.60} as {list(expected['input_ids'])[:8]}, but the "
                f"{TOKENIZER_JSON} that it saves encodes it as {row['input_ids'][:8]}, "
                "and prediction reads only this file. Choose a model with another "
                "tokenizer"
            )


def clean_up(text: str) -> str:
    """Remove the spaces before punctuation and English contractions, as transformers'
    `clean_up_tokenization`."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text


@contextmanager
def _explain_wrong_texts(texts: Sequence[Any]) -> Iterator[None]:
    """Name the first input that is not text; `tokenizers` says only that there is
    one."""
    try:
        yield
    except (TypeError, ValueError):
        for text in texts:
            for part in [text] if isinstance(text, str) else _parts(text):
                _check_text(part)
        raise


def _parts(text: Any) -> Iterable[Any]:
    return text if isinstance(text, list | tuple) and len(text) == 2 else [text]


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise DataError(f"{text!r} is not a text; expected a string, or two")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(
            f"{text[: error.start + 1][-40:]!r}: character {error.start + 1} is "
            f"U+{code:X}, half of a surrogate pair, which no text in UTF-8 has; read "
            "the source as UTF-8, or remove it"
        ) from None


def _hash(state: str, settings: TokenizerSettings) -> str:
    """Hash a tokenizer, without the settings that each call chooses and the settings of
    decoding."""
    deciding = replace(settings, model_max_length=None, clean_up=False)
    return hashlib.sha256(f"{state} {astuple(deciding)}".encode()).hexdigest()
