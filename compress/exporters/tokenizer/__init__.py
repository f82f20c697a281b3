"""Build tokenizers as graphs, and text files that contain them: see `text_model`."""
