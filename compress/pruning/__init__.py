"""Pruning as a run: from sizes or a budget to a smaller model that has recovered and
ships."""
