"""Write the bundle of an encoder without a task: it returns a vector for each token,
`last_hidden_state`, and cannot predict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.exporters.artifact import Bundle, writing
from compress.exporters.bundle_files import write_encoder
from compress.exporters.card import Card, file_card
from compress.exporters.manifest import Manifest


def write(
    path: Path,
    *,
    model: Any,
    tokenizer: Any,
    max_length: int,
    card: Mapping[str, Any],
    opset: int = 17,
) -> Bundle:
    """Write weights, tokenizer, and ONNX in fp32 and int8. `card` has the fields of
    `Card`. Raises ExportError as `to_onnx` does."""
    content = Card.parse(card)
    manifest = Manifest.from_model(model, max_length, kind="encoder")
    about = f"""{manifest.model_type} encoder of texts of at most {max_length} tokens:
`last_hidden_state`, a vector for each token. Made with compress.

`onnx/model.onnx` is the model in float32, `onnx/model_quantized.onnx` in int8. Inputs:
input_ids, attention_mask and, where the model has segments, token_type_ids."""
    load = """from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModel.from_pretrained(".")
vectors = model(**tokenizer("a text", return_tensors="pt")).last_hidden_state"""
    page = file_card(
        content, "transformers", "feature-extraction", about=[about], load=load
    )
    with writing(path, manifest, page) as folder:
        write_encoder(folder, model, tokenizer, max_length, opset=opset)
    return Bundle.load(path)
