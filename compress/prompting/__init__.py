"""Prompted language models as teachers: the likelihood of each label after a prompt is
what the student learns."""
