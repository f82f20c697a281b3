"""Build students: always plain transformers models, initialised from scratch, a teacher, or a checkpoint."""

from compress.students.build import build, config_for
from compress.students.layers import copied_layers

__all__ = ["build", "config_for", "copied_layers"]
