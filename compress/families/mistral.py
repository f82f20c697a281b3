"""Mistral, with Llama's blocks and a window for all layers."""

from dataclasses import replace

from compress.families import llama

FAMILY = replace(llama.FAMILY, name="mistral", kin="mistral", all_windowed=True)
