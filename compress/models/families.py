"""Register our own models under the name that the cards of version 0.2 import."""

from compress.models import own_classes  # noqa: F401
