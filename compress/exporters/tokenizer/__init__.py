"""Tokenizers as graphs, and text files with them: see `text_model`."""
