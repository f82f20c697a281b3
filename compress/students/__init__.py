"""Build students: always plain transformers models, initialised from scratch, a teacher, or a checkpoint."""

from compress.slicing.layers import copied_layers
from compress.students.build import begun_from, build, config_for, planned

__all__ = ["begun_from", "build", "config_for", "copied_layers", "planned"]
