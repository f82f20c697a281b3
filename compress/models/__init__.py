"""Load and build models. Import `compress.models.families` to load checkpoints of our
own families."""
