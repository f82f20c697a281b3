"""Teachers that are asked: a language model answers a prompt, and the likelihood of each label is what it teaches."""
