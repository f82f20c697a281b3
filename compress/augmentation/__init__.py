"""More rows for a task, made of the ones it has."""

from compress.augmentation.rows import augment, near_words

__all__ = ["augment", "near_words"]
