"""Describe what a sentence encoder does besides encoding tokens, and keep it in the
config of its encoder.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from compress.data.text_preparation import AS_IT_IS, TextPreparation
from compress.models.sentence_modules import (
    TOKEN_FEATURE,
    VECTOR,
    Dense,
    Dropout,
    Normalize,
    Pooling,
    SentenceModule,
    from_plain,
    to_plain,
)


@dataclass(frozen=True)
class SentenceSettings:
    """Describe what a sentence encoder does besides encoding tokens.

    modules        the modules after the encoder, in order; none: it returns tokens only
    preparation    the prompts
    max_length     the most tokens of a text; None: not limited, or not known yet
    similarity     the name of the function that compares vectors; None: the cosine
    truncate_dim   the numbers of a vector that are kept, the first ones; None: all
    """

    modules: tuple[SentenceModule, ...] = ()
    preparation: TextPreparation = AS_IT_IS
    max_length: int | None = None
    similarity: str | None = None
    truncate_dim: int | None = None

    @classmethod
    def pooled(
        cls,
        hidden: int,
        *modes: str,
        normalise: bool = False,
        max_length: int | None = None,
    ) -> Self:
        """Return the settings of an encoder of width `hidden` whose tokens are pooled,
        and perhaps normalised."""
        modules: tuple[SentenceModule, ...] = (Pooling(modes or ("mean",), hidden),)
        return cls(
            (*modules, Normalize()) if normalise else modules, max_length=max_length
        )

    @property
    def embeds(self) -> bool:
        """Check whether texts get a vector; if not, tokens do."""
        return any(module.writes == VECTOR for module in self.modules)

    @property
    def leaves_out_prompts(self) -> bool:
        """Check whether the tokens of a prompt are left out when tokens are pooled."""
        return any(
            isinstance(module, Pooling) and not module.include_prompt
            for module in self.modules
        )

    @property
    def normalises(self) -> bool:
        """Check whether all vectors have length 1."""
        last = next(
            (module for module in reversed(self.modules) if module.writes == VECTOR),
            None,
        )
        return isinstance(last, Normalize) and self.truncate_dim is None

    @property
    def ranks_by_cosine(self) -> bool:
        """Check whether the model's similarity ranks vectors as their cosine does."""
        same = ("cosine", "dot", "euclidean") if self.normalises else ("cosine",)
        return self.similarity is None or self.similarity in same

    def width(self, hidden: int) -> int:
        """Return the width of the vectors of an encoder of this width. Raises
        ValueError: see `check_modules`."""
        width = check_modules(self.modules, hidden).get(VECTOR, hidden)
        return min(width, self.truncate_dim or width)

    def to_plain(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        return {
            "modules": [to_plain(module) for module in self.modules],
            "prompts": dict(self.preparation.prompts),
            "default_prompt": self.preparation.default,
            "max_length": self.max_length,
            "similarity": self.similarity,
            "truncate_dim": self.truncate_dim,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the settings that `to_plain` wrote."""
        modules = tuple(from_plain(each) for each in plain["modules"])
        preparation = TextPreparation(dict(plain["prompts"]), plain["default_prompt"])
        return cls(
            modules,
            preparation,
            plain["max_length"],
            plain["similarity"],
            plain["truncate_dim"],
        )


TOKENS_ONLY: Final = SentenceSettings()
"""The settings of an encoder without modules."""


def check_modules(
    modules: tuple[SentenceModule, ...], hidden: int
) -> Mapping[str, int]:
    """Return the width of every feature after the modules, given that of the tokens.

    Raises ValueError for a module that reads a feature that no earlier module computes,
    or one of another width.
    """
    widths = {TOKEN_FEATURE: hidden}
    for number, module in enumerate(modules, start=1):
        if module.reads not in widths:
            raise ValueError(
                f"module {number}, {module.kind}, reads {module.reads}, which no "
                "module before it computes"
            )
        try:
            widths[module.writes] = module.width(widths[module.reads])
        except ValueError as error:
            raise ValueError(f"module {number}, {module.kind}: {error}") from None
    return widths


def find_projection(modules: tuple[SentenceModule, ...]) -> int | None:
    """Return the index of the only linear map between the encoder's width and the
    vector, or None.

    An encoder that loses some of its width then needs fewer columns of this map, and no
    other change.
    """
    feature = TOKEN_FEATURE
    for number, module in enumerate(modules):
        if isinstance(module, Pooling):
            feature = VECTOR
        elif isinstance(module, Dense):
            bypassed = feature == VECTOR and any(
                later.reads == TOKEN_FEATURE for later in modules[number:]
            )
            return (
                number
                if module.is_plain and module.source == feature and not bypassed
                else None
            )
        elif not isinstance(module, Dropout):
            return None
    return None


def with_projection(
    settings: SentenceSettings, hidden: int
) -> tuple[SentenceSettings, int | None]:
    """Insert a linear map that `find_projection` finds, and also return its index; None
    if there is one already.

    It has neither bias nor activation, and as the identity it changes no vector.
    """
    if find_projection(settings.modules) is not None:
        return settings, None
    first = settings.modules[0]
    if isinstance(first, Pooling) and all(
        module.reads != TOKEN_FEATURE for module in settings.modules[1:]
    ):
        at = 1
        feature = VECTOR
        width = first.width(hidden)
    else:
        at = 0
        feature = TOKEN_FEATURE
        width = hidden
    inserted = Dense(
        width, width, bias=False, activation="Identity", source=feature, target=feature
    )
    modules = (*settings.modules[:at], inserted, *settings.modules[at:])
    return replace(settings, modules=modules), at


def resize(settings: SentenceSettings, before: int, hidden: int) -> SentenceSettings:
    """Fit the modules of an encoder of width `before` to an encoder of width `hidden`,
    without changing the width of the vectors."""
    if before == hidden or not settings.embeds:
        return settings
    settings, _ = with_projection(settings, before)
    last = find_projection(settings.modules)
    assert last is not None, "it exists now"
    modules = list(settings.modules)
    pooled = hidden
    for number, module in enumerate(modules[: last + 1]):
        width = hidden if module.reads == TOKEN_FEATURE else pooled
        modules[number] = module.resized(width)
        pooled = modules[number].width(width)
    return replace(settings, modules=tuple(modules))


SETTINGS_KEY: Final = "sentence_embedding"
"""The name of the config's setting that holds `SentenceSettings` as JSON, and the width
of the encoder they are for."""


def settings_of(config: Any) -> SentenceSettings:
    """Return the settings of a sentence encoder of this config; by default the mean of
    its tokens, normalised to length 1.

    They fit the config's width. If it has changed since they were set, because the
    encoder was cut or a student of another width was planned, a linear map keeps the
    vectors in their space: see `sentence_folder.resize`.
    """
    width = int(config.hidden_size)
    plain = getattr(config, SETTINGS_KEY, None)
    if not plain:
        return SentenceSettings.pooled(width, normalise=True)
    return resize(SentenceSettings.from_plain(plain), plain["hidden"], width)


def set_settings(config: Any, settings: SentenceSettings) -> None:
    """Give sentence encoders of this config these settings."""
    plain = settings.to_plain() | {"hidden": int(config.hidden_size)}
    setattr(config, SETTINGS_KEY, plain)


def width_of(config: Any) -> int:
    """Return the width of a sentence encoder's vectors."""
    return settings_of(config).width(int(config.hidden_size))
