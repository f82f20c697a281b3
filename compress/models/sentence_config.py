"""Keep the settings of a sentence encoder in the config of its encoder, as a setting of ours. Imports no torch."""

from typing import Any, Final

from compress.models.sentence_folder import SentenceSettings, resize

SETTINGS: Final = "sentence_embedding"
"""The name of the config's setting that holds `SentenceSettings` as JSON, and the width of the encoder they are for."""


def settings_of(config: Any) -> SentenceSettings:
    """Return the settings of a sentence encoder of this config; by default the mean of its tokens, at length 1.

    They fit the config's width. If it has changed since they were set, because the encoder was cut or a student of
    another width was planned, a linear map keeps the vectors in their space: see `sentence_folder.resize`.
    """
    width = int(config.hidden_size)
    plain = getattr(config, SETTINGS, None)
    if not plain:
        return SentenceSettings.pooled(width, normalise=True)
    return resize(SentenceSettings.from_plain(plain), plain["hidden"], width)


def set_settings(config: Any, settings: SentenceSettings) -> None:
    """Give sentence encoders of this config these settings."""
    setattr(config, SETTINGS, settings.to_plain() | {"hidden": int(config.hidden_size)})


def width_of(config: Any) -> int:
    """Return the width of a sentence encoder's vectors."""
    return settings_of(config).width(int(config.hidden_size))


def stay_in_space(config: Any, taught: Any) -> None:
    """Give a student of this config the modules of its teacher, so that its vectors lie in the same space."""
    setattr(config, SETTINGS, settings_of(taught).to_plain() | {"hidden": int(taught.hidden_size)})
