"""Qwen2, with Llama's blocks."""

from dataclasses import replace

from compress.families import llama

FAMILY = replace(llama.FAMILY, name="qwen2", kin="qwen2")
