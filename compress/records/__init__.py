"""Keep results as plain dataclasses, and write and read them as JSON."""
