"""Gates that are learned with a model, on all of its units at once, and what they are to leave of it."""
