"""Generate text with the graphs of a generative bundle, without torch and
transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.arguments import read_texts
from compress.arrays import Floats
from compress.data.answers import AnswerColumns, Written, join_columns
from compress.data.encoder import Text, TextEncoder
from compress.data.task import Task
from compress.errors import BundleError
from compress.exporters.session import open_session
from compress.io import parse_json
from compress.slicing.shape import sizes_of

if TYPE_CHECKING:
    import onnxruntime
    import pyarrow as pa

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


@dataclass(frozen=True)
class TextWriter:
    """Generate at most `new` tokens after each text, or in answer to it."""

    encoder: TextEncoder
    generator: "TextGenerator"
    max_length: int
    new: int
    rows_per_batch: int = 32

    @property
    def task(self) -> Task:
        return Task("generation", ("text",), "answer", (), "negative loss")

    @classmethod
    def open(
        cls,
        folder: Path,
        precision: str,
        *,
        max_length: int,
        new: int,
        threads: int = 1,
    ) -> "TextWriter":
        """Open tokenizer and sessions. Raises BundleError for a folder without a file
        of this precision."""
        generator = TextGenerator.open(folder, precision, threads)
        return cls(TextEncoder.from_folder(folder), generator, max_length, new)

    def complete(self, texts: Sequence[str]) -> list[str]:
        positions = self.generator.positions or self.max_length + self.new
        longest = min(self.max_length, positions - self.new)
        if longest < 1:
            raise BundleError(
                f"new {self.new}: leaves no token of a text; this model has "
                f"{positions} positions: give less than that"
            )
        return [
            self.encoder.decode(self.generator.generate(row["input_ids"], new=self.new))
            for row in self.encoder.encode(texts, longest)
        ]

    def predict(self, texts: Sequence[Text]) -> list[Written]:
        given = list(read_texts(texts, self.task.text, where="TextWriter.predict"))
        return [Written(text) for text in self.complete(given)]

    def answer_columns(self, texts: Sequence[Text]) -> AnswerColumns:
        return join_columns(self.predict(texts))

    def answer_schema(self) -> "pa.Schema":
        import pyarrow as pa

        return pa.schema({"prediction": pa.string()})


@dataclass(frozen=True)
class TextGenerator:
    """Greedy generation from open sessions.

    encoder    of a sequence-to-sequence model
    start      the token that its answers begin with
    ends       the tokens that end a text
    positions  the most tokens of a decoder, including the prompt
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
        config: dict[str, Any] = {}
        for name in ("config.json", "generation_config.json"):
            if (folder / name).is_file():
                config |= parse_json(folder / name)
        ends = config.get("eos_token_id")
        pair = (folder / ENCODER["fp32"]).is_file()
        decoder = DECODER if pair else DECODER_ONLY
        encoder = open_session(folder / ENCODER[precision], threads) if pair else None
        if not isinstance(ends, list):
            ends = [] if ends is None else [ends]
        return cls(
            decoder=open_session(folder / decoder[precision], threads),
            encoder=encoder,
            start=config.get("decoder_start_token_id"),
            ends=frozenset(ends),
            positions=None if pair else sizes_of(config).get("positions"),
        )

    def generate(self, ids: Ids, *, new: int) -> list[int]:
        """Generate at most `new` token ids, including the end token, after these or in
        answer to them, by greedy decoding.

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
