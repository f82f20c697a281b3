"""Load and build models. Import `compress.models.own_classes` to load checkpoints of
our own models."""
