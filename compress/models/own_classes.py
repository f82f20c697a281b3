"""Register our own models with the Auto classes of transformers, when this module is
imported."""

from compress.models import ibbert, static  # noqa: F401
