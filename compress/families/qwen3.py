"""Qwen3, with Llama's blocks and norms of queries and keys."""

from dataclasses import replace

from compress.families import llama

FAMILY = replace(llama.FAMILY, name="qwen3", kin="qwen3")
