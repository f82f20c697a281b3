"""Rewrite graphs (see `forms`); the other modules hold the steps."""
