"""Register model families of ours. Importing this module makes the Auto classes of transformers know them."""

from compress.models import ibbert, static  # noqa: F401  they register themselves
