"""Rewriting of graphs, see `forms`; the steps are in the other modules."""
