"""More rows for a task, made of the ones it has."""

from compress.augmentation.rows import augment

__all__ = ["augment"]
