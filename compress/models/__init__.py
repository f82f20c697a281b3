"""Checkpoints, teachers, heads, students. Import `compress.models.families` to load checkpoints of our own families."""
