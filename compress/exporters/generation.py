"""Write and run bundles of generative models: GPT-2 and Llama's like as one decoder, T5
as two files.

    GPT-2:  onnx/model.onnx            T5:  onnx/encoder_model.onnx
    onnx/decoder_model_merged.onnx and each in int8, as onnx/model_quantized.onnx

The names are those of optimum's ORTModelForCausalLM and ORTModelForSeq2SeqLM, and of
transformers.js. Loading a bundle and generating text import neither torch nor
transformers.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress import families
from compress.data.encoder import TextEncoder
from compress.errors import BundleError, ExportError
from compress.exporters.artifact import Bundle, writing
from compress.exporters.manifest import Manifest

if TYPE_CHECKING:
    import onnxruntime

Floats = NDArray[np.float32]
Ids = Sequence[int]
DECODER_ONLY: Mapping[str, str] = {
    "fp32": "onnx/model.onnx",
    "int8": "onnx/model_quantized.onnx",
}
ENCODER: Mapping[str, str] = {
    "fp32": "onnx/encoder_model.onnx",
    "int8": "onnx/encoder_model_quantized.onnx",
}
DECODER: Mapping[str, str] = {
    "fp32": "onnx/decoder_model_merged.onnx",
    "int8": "onnx/decoder_model_merged_quantized.onnx",
}
TOLERANCE = 1e-3
"""The largest difference of the files' logits from the model's, relative to the largest
logit (or to 1)."""


def complete(
    folder: Path, texts: Sequence[str], precision: str, *, max_length: int, new: int
) -> list[str]:
    """Write at most `new` tokens after each text, or in answer to it."""
    encoder = TextEncoder.from_folder(folder)
    generator = TextGenerator.open(folder, precision)
    rows = encoder.encode(texts, max_length)
    return [
        encoder.decode(generator.generate(row["input_ids"], new=new)) for row in rows
    ]


@dataclass(frozen=True)
class TextGenerator:
    """Greedy generation from open sessions.

    encoder    of a sequence-to-sequence model
    start      the token that its answers begin with
    ends       the tokens that end a text
    positions  the most tokens of a decoder, prompt included
    """

    decoder: "onnxruntime.InferenceSession"
    encoder: "onnxruntime.InferenceSession | None"
    start: int | None
    ends: frozenset[int]
    positions: int | None

    @classmethod
    def open(
        cls, folder: Path, precision: str = "int8", threads: int = 1
    ) -> "TextGenerator":
        """Open the sessions. Raises ExportError for a folder without a file of this
        precision."""
        from compress.exporters.session import open_session

        config: dict[str, Any] = {}
        for name in ("config.json", "generation_config.json"):
            if (folder / name).is_file():
                config |= json.loads((folder / name).read_text(encoding="utf-8"))
        ends = config.get("eos_token_id")
        pair = (folder / ENCODER["fp32"]).is_file()
        paths = [
            folder / names[precision]
            for names in ((DECODER, ENCODER) if pair else (DECODER_ONLY,))
        ]
        sessions = [open_session(path, threads) for path in paths]
        return cls(
            decoder=sessions[0],
            encoder=sessions[1] if pair else None,
            start=config.get("decoder_start_token_id"),
            ends=frozenset(
                ends if isinstance(ends, list) else [] if ends is None else [ends]
            ),
            positions=config.get("n_positions") if not pair else None,
        )

    def generate(self, ids: Ids, *, new: int) -> list[int]:
        """Generate at most `new` token ids after these, or in answer to them, the end
        token included: always the most likely one.

        Raises BundleError for an empty prompt, and for more tokens than the model has
        positions.
        """
        if not ids:
            raise BundleError(
                "cannot complete an empty text: it has no tokens; give at least one "
                "word"
            )
        if self.positions is not None and len(ids) + new > self.positions:
            raise BundleError(
                f"{len(ids)} tokens and {new} new ones; this model has "
                f"{self.positions} positions"
            )
        if self.encoder is not None and self.start is None:
            raise BundleError(
                "config.json has no decoder_start_token_id, with which the answer "
                "begins"
            )
        past = self.begin(ids)
        read = list(ids) if self.encoder is None else [self.start or 0]
        generated: list[int] = []
        while len(generated) < new and not (generated and generated[-1] in self.ends):
            logits, past = self.step(past, read)
            read = [int(logits[-1].argmax())]
            generated += read
        return generated

    def begin(self, source: Ids) -> dict[str, Any]:
        """Build the decoder's inputs besides tokens: empty keys and values, and the
        encoder's states of `source`."""
        empty = {
            node.name: np.zeros((1, node.shape[1], 0, node.shape[3]), np.float32)
            for node in self.decoder.get_inputs()
            if node.name.startswith("past_key_values.")
        }
        if self.encoder is None:
            return empty
        feeds = {
            "input_ids": np.array([source], np.int64),
            "attention_mask": np.ones((1, len(source)), np.int64),
        }
        (states,) = self.encoder.run(["last_hidden_state"], feeds)
        return {
            **empty,
            "encoder_hidden_states": states,
            "encoder_attention_mask": feeds["attention_mask"],
            "use_cache_branch": np.array([False]),
        }

    def step(self, past: Mapping[str, Any], ids: Ids) -> tuple[Floats, dict[str, Any]]:
        """Compute the logits (tokens, vocabulary) of these tokens, and the other inputs
        of the next step."""
        cached = next(
            value for name, value in past.items() if name.startswith("past_key_values.")
        ).shape[2]
        feeds = {**past, "input_ids": np.array([ids], np.int64)}
        if self.encoder is None:
            feeds["attention_mask"] = np.ones((1, cached + len(ids)), np.int64)
            feeds["position_ids"] = np.arange(cached, cached + len(ids))[None]
        names = [node.name for node in self.decoder.get_outputs()]
        outputs = dict(zip(names, self.decoder.run(names, feeds), strict=True))
        logits: Floats = outputs.pop("logits")[0]
        following = {
            name.replace("present.", "past_key_values."): value
            for name, value in outputs.items()
        }
        branch = {} if self.encoder is None else {"use_cache_branch": np.array([True])}
        return logits, {**past, **following, **branch}


def write(
    path: Path,
    *,
    model: Any,
    tokenizer: Any,
    max_length: int,
    card: Mapping[str, Any],
    opset: int = 17,
) -> Bundle:
    """Write a decoder or T5: weights, tokenizer, and the graphs in fp32 and int8,
    checked against the model.

    `card` has the fields of `Card`. Raises ExportError for another architecture, for a
    model of over 2 GB, and where the files do not compute what the model does.
    """
    from compress.exporters.card import Card, file_card
    from compress.exporters.int8 import quantize_dynamic
    from compress.exporters.onnx import as_float32, check_size
    from compress.models.checkpoints import save_checkpoint

    manifest = Manifest.from_model(model, max_length, kind="generative")
    content = Card.parse(card)
    check_size(model, content.name)
    plain = as_float32(model)
    plain.set_attn_implementation("eager")
    with writing(path, manifest) as folder:
        save_checkpoint(folder, plain, tokenizer, max_length)
        raw = folder / "raw"
        graphs = _trace(plain, raw, opset)
        _finish(raw, folder / "onnx", "")
        check(plain, folder)
        for graph in graphs:
            quantize_dynamic(
                raw / graph, raw / graph.replace(".onnx", "_quantized.onnx")
            )
        _finish(raw, folder / "onnx", "_quantized")
        shutil.rmtree(raw)
        (folder / "README.md").write_text(
            file_card(
                content,
                "transformers",
                "text-generation",
                about=[ABOUT.format(kind=plain.config.model_type)],
                load=LOAD,
            ),
            encoding="utf-8",
        )
    return Bundle.load(path)


def _trace(plain: Any, folder: Path, opset: int) -> list[str]:
    from compress.exporters import decoders

    modules: dict[str, dict[str, Any]] = {
        "decoder": {"model.onnx": decoders.CausalDecoder},
        "encoder-decoder": {
            "encoder_model.onnx": decoders.SourceEncoder,
            "first.onnx": partial(decoders.T5Decoder, first=True),
            "following.onnx": partial(decoders.T5Decoder, first=False),
        },
    }
    stacks = families.find(plain.config.model_type).generates
    if not stacks:
        known = families.names("generates")
        raise ExportError(
            f"{type(plain).__name__}: cannot be exported as a generative model; "
            f"expected one of {known}"
        )
    folder.mkdir()
    for file, module in modules[stacks].items():
        decoders.trace(module(plain), folder / file, opset=opset)
    return list(modules[stacks])


def _finish(raw: Path, target: Path, suffix: str) -> None:
    """Write the graphs as they ship: T5's decoders merged into one file, shared
    matrices stored once."""
    import onnx

    from compress.exporters.decoders import merge_decoders, tie_matrices
    from compress.exporters.session import read_model

    target.mkdir(exist_ok=True)
    if (raw / f"first{suffix}.onnx").is_file():
        decoder = merge_decoders(
            read_model(raw / f"first{suffix}.onnx"),
            read_model(raw / f"following{suffix}.onnx"),
        )
        onnx.save_model(
            tie_matrices(decoder), target / f"decoder_model_merged{suffix}.onnx"
        )
    for name in ("model", "encoder_model"):
        if (raw / f"{name}{suffix}.onnx").is_file():
            onnx.save_model(
                tie_matrices(read_model(raw / f"{name}{suffix}.onnx")),
                target / f"{name}{suffix}.onnx",
            )


def check(model: Any, folder: Path) -> float:
    """Compute the largest difference between the folder's fp32 logits, computed in
    several steps, and the model's, computed in one; relative to the largest logit (or
    to 1). Raises ExportError where it exceeds TOLERANCE."""
    import torch

    seeded, generator = (
        torch.Generator().manual_seed(0),
        TextGenerator.open(folder, "fp32"),
    )
    ids = torch.randint(model.config.vocab_size, (1, 9), generator=seeded)
    source = torch.randint(model.config.vocab_size, (1, 6), generator=seeded)
    with torch.no_grad():
        out = (
            model(ids)
            if generator.encoder is None
            else model(input_ids=source, decoder_input_ids=ids)
        )
    expected = out.logits[0].numpy()
    past, found = generator.begin(source[0].tolist()), []
    for part in ids[0].split([5, 1, 2, 1]):
        logits, past = generator.step(past, part.tolist())
        found.append(logits)
    difference, largest = (
        float(np.abs(np.concatenate(found) - expected).max()),
        float(np.abs(expected).max()),
    )
    if not difference <= TOLERANCE * max(1.0, largest):  # so that NaN fails too
        raise ExportError(
            f"{type(model).__name__}: the ONNX files' logits differ from the model's "
            f"by {difference:.2g} where the largest is {largest:.2g}; the weights may "
            "hold NaN, or this architecture cannot be traced"
        )
    return difference / max(1.0, largest)


ABOUT = """{kind}, as ONNX with the keys and values of the tokens before as inputs and outputs. Made with compress. optimum's
ORTModelForCausalLM or ORTModelForSeq2SeqLM (`subfolder="onnx"`) and transformers.js load this folder."""  # noqa: E501
LOAD = """from compress import Bundle

Bundle.load(".").complete(["a text"])  # int8, without torch"""
