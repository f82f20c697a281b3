"""Export an encoder with a task head as fp32 ONNX, and prove that the file computes the
same as the model.

The graph is left unfused, from the TorchScript exporter under eager attention:
onnxruntime's session optimiser makes this form the fastest on a CPU, and
`quantize_dynamic` can read it (graphs of the dynamo exporter fail its shape inference).
It is rewritten so that it computes only what the answer reads (`exporters.rewrite`).
For families with a `prepared_mask`, this module computes the attention mask, in a form
that rewriting can move to the keys; other models compute their own.
"""

import copy
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnxruntime import InferenceSession
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress import families
from compress.arrays import Floats
from compress.errors import CompressError, ExportError, first_reason
from compress.exporters import probes
from compress.exporters.probes import TRACED, Probe
from compress.exporters.rewrite.forms import SHIPPED_FORM, Form, rewrite_graph
from compress.exporters.session import (
    PROMPT_LENGTH,
    SESSION_KEY,
    SESSION_WHY_KEY,
    UNFUSED_SKIP,
    UNFUSED_SKIP_WHY,
    UNOPENED,
    open_session,
    quiet,
    runtime_reason,
)
from compress.io import atomic_file
from compress.models.flops import count_parameters
from compress.models.memory import is_dispatched
from compress.models.sentence_encoder import SentenceEncoder
from compress.provenance import versions
from compress.tensors import TensorDict, Tensors

PROTOBUF_LIMIT = 2**31
MASKED_SCORE = -1e4
"""The value added to the scores of masked tokens: its exp() is 0 in float32, and unlike
float32's lowest number it cannot overflow."""

OUTPUTS = (
    "logits",
    "start_logits",
    "end_logits",
    "last_hidden_state",
    "sentence_embedding",
)
"""The names that the hub's tools expect for a file's outputs."""

ONNX_TOLERANCE = 1e-3
"""The largest allowed difference of a file's logits from the model's, relative to the
largest logit (or to 1); float32 noise is 1e-6."""

ANOTHER_FAMILY = (
    "export a model of another family, such as a student that `compress distill` makes "
    "of this one"
)
"""The remedy for a family whose graph ONNX cannot hold."""

USEFUL = 64
"""The lowest `max_length` at which a file for short texts alone is still suggested."""
READABLE = 3
"""Tokens of the shortest text, which every model must read: one word between two
special tokens."""
CHECKED_KEY = "compress.checked_tokens"
"""The metadata property that holds the most tokens of a text on which the file was
compared with its model."""


def to_onnx(
    model: nn.Module,
    path: Path,
    *,
    opset: int = 17,
    segments: bool = True,
    form: Form | None = SHIPPED_FORM,
    max_length: int | None = None,
) -> None:
    """Export a model to the ONNX file `path`.

    Inputs   input_ids, attention_mask, and token_type_ids where the model has segments
             and the tokenizer makes `segments`; each (batch_size, sequence_length)
             int64
    Outputs  logits float32 (batch_size, outputs), or (batch_size, sequence_length,
             outputs) of a head that answers per token; start_logits and end_logits
             (batch_size, sequence_length) of one that answers with spans; of an encoder
             last_hidden_state (batch_size, sequence_length, hidden), and
             sentence_embedding (batch_size, width) of a sentence encoder
    Optional prompt_length int64 (batch_size,) of a sentence encoder that does not pool
             the tokens of prompts: how many tokens a prompt takes at the beginning; it
             defaults to 0 for runtimes that do not know it
    form     how the graph is rewritten (`rewrite.forms.rewrite_graph`, which needs
             opset 13); None: it stays as traced
    max_length   the most tokens of the texts that the file is for; None: 512, or as
                 many as the model has positions

    The model is not changed: mode, attention implementation, dtype, device. Raises
    ExportError if the model cannot be exported or is over 2 GB, or if the file's
    answers differ from the model's: they are compared at other shapes than the traced
    one, up to `max_length` (see `exporters.probes`), since a tracer that mistakes a
    size for a constant only warns.
    """
    check_size(model)
    longest = probes.longest_text(model, max_length)
    refuse_unfaithful(model, longest)
    shapes = probes.choose_probes(model, max_length)
    plain = as_float32(model)
    config = plain.config
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial:
        traced = _draw(plain, traced_shape(config, longest), segments=segments)
        _trace(plain, traced, partial, opset)
        file = onnx.load_model(partial)
        _read_shared_weights(file.graph)
        if PROMPT_LENGTH in traced:
            file.graph.initializer.append(
                onnx.numpy_helper.from_array(np.zeros(1, np.int64), PROMPT_LENGTH)
            )
        file.producer_name = "compress"
        file.producer_version = versions(["compress"])["compress"]
        properties = {
            "compress.version": file.producer_version,
            "compress.model_type": config.model_type,
            "compress.task": config.problem_type or "",
            "compress.labels": json.dumps(
                [label for _, label in sorted(config.id2label.items())]
            ),
            CHECKED_KEY: str(shapes[-1].tokens),
            SESSION_KEY: json.dumps(UNFUSED_SKIP),
            SESSION_WHY_KEY: UNFUSED_SKIP_WHY,
        }
        onnx.helper.set_model_props(file, properties)
        if form is not None:
            file = rewrite_graph(file, form).model
        onnx.save_model(file, partial)
        _check(model, partial, shapes, segments=segments)


def refuse_unfaithful(model: nn.Module, longest: int) -> None:
    """Raise ExportError for a model that computes something else than its file would on
    texts of up to `longest` tokens, or something else here than it was trained to
    compute."""
    kind = type(model).__name__
    config: Any = model.config
    if reason := families.find(config.model_type).without_kernels(config):
        raise ExportError(
            f"{kind}: {reason}; or distil it on a GPU into a student of another family"
        )
    switch = probes.find_switch(config)
    if switch is not None and switch.tokens < longest:
        raise ExportError(
            f"{kind}: {switch.setting} in its config.json changes how texts of more "
            f"than {switch.tokens} tokens are read, and a file reads all texts in one "
            f"way; give max_length {switch.tokens}, or less{switch.remedy}"
        )


def check_size(model: nn.Module, name: str = "") -> None:
    """Raise ExportError, naming the model or its class, if its weights do not fit into
    an ONNX file, or into memory."""
    if is_dispatched(model):
        raise ExportError(
            f"{name or type(model).__name__}: this machine's memory cannot hold it"
        )
    if (size := 4 * count_parameters(model)) >= PROTOBUF_LIMIT:
        name = name or type(model).__name__
        raise ExportError(
            f"{name}: {size / 1e9:.1f} GB of float32 weights; an ONNX file holds at "
            "most 2 GB"
        )


def parity(model: nn.Module, path: Path, batches: Iterable[Tensors]) -> float:
    """Compute the largest |logit difference| between the model, in float32 on the CPU,
    and the file under onnxruntime.

    A batch holds at least the file's inputs, (rows, tokens); other keys are ignored.
    The model is not changed. Returns NaN if any logit is NaN. Raises ExportError if
    there is no batch.
    """
    session = open_session(path)
    names = {
        "input_ids",
        "attention_mask",
        *(node.name for node in session.get_inputs()),
    }
    differences = list[float]()
    for batch in batches:
        expected = _answer(
            model, {name: tensor for name, tensor in batch.items() if name in names}
        )
        differences.append(_compare(session, batch, expected).largest)
    if not differences:
        raise ExportError(f"{path}: parity needs at least one batch")
    return float(np.max(differences))


def as_float32(model: nn.Module) -> Any:
    """Copy the model in float32, in eval mode, on the CPU: modules and config are
    copies, the weights are shared if they are float32 on the CPU already. Changes to
    modules or config do not affect the original."""
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(
            parameter.detach().to("cpu", torch.float32), requires_grad=False
        )
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, shared).to("cpu").float().eval()


class TracedModel(nn.Module):
    """The module that is traced: reads ids and a 0/1 mask, returns the tensors of
    `outputs_of`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.more: TensorDict = {}
        self.prepares = families.find(model.config.model_type).prepared_mask
        # a classifier of ModernBERT that takes a mean over the tokens reads the mask
        # too
        pools = getattr(model.config, "classifier_pooling", "") == "mean" and hasattr(
            model, "classifier"
        )
        if self.prepares and pools:
            self.prepares = False
            model.base_model.register_forward_pre_hook(
                _prepare_inside, with_kwargs=True
            )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        config = self.model.config
        mask = (
            prepare_mask(attention_mask, config, self.model.dtype)
            if self.prepares
            else attention_mask
        )
        # T5 classifies at the end-of-text token, which random ids may lack
        if config.is_encoder_decoder:
            last_B1 = attention_mask.sum(1, keepdim=True) - 1
            input_ids = input_ids.scatter(
                1, last_B1, torch.full_like(last_B1, config.eos_token_id)
            )
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return tuple(
            outputs_of(
                self.model(
                    input_ids=input_ids, attention_mask=mask, **segments, **self.more
                )
            ).values()
        )


class TracedSentenceEncoder(TracedModel):
    """Traces a sentence encoder that does not pool the tokens of prompts: an additional
    input says how many tokens the prompt has."""

    def forward(  # type: ignore[override]  # the tracer passes inputs by their place
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        prompt_length: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        self.more = {PROMPT_LENGTH: prompt_length}
        return super().forward(input_ids, attention_mask, token_type_ids)


def _prepare_inside(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask = kwargs["attention_mask"]
    if isinstance(mask, Tensor) and mask.dim() == 2:
        kwargs = {
            **kwargs,
            "attention_mask": prepare_mask(mask, encoder.config, encoder.dtype),
        }
    return args, kwargs


def prepare_mask(
    mask_BL: Tensor, config: Any, dtype: torch.dtype = torch.float32
) -> Any:
    """Compute the mask that is added to the scores (batch, 1, 1 or tokens, tokens):
    one, or one per kind of layer."""
    seen = mask_BL[:, None, None, :]
    kinds = getattr(config, "layer_types", None)
    family = families.find(config.model_type)
    looks_back = getattr(config, "is_decoder", False) or (
        family.looks_back and getattr(config, "is_causal", True)
    )
    if looks_back:
        seen = seen * torch.ones_like(seen.expand(-1, -1, seen.shape[-1], -1)).tril()
    full = (1.0 - seen.to(dtype)) * MASKED_SCORE
    windowed = family.all_windowed and config.sliding_window is not None
    if "sliding_attention" not in (kinds or ()) and not windowed:
        return full
    place_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    apart_LL = place_L[:, None] - place_L[None, :]
    far_LL = (
        apart_LL >= config.sliding_window
        if looks_back
        else apart_LL.abs() > config.sliding_window
    )
    near = (full + far_LL * MASKED_SCORE).clamp(min=MASKED_SCORE)
    # Mistral's layers are all alike
    return {"full_attention": full, "sliding_attention": near} if kinds else near


def outputs_of(out: Any) -> TensorDict:
    """Select the tensors of a model's output that the file returns, by their names in
    OUTPUTS."""
    return {name: out[name] for name in OUTPUTS if name in out}


@contextmanager
def tracing(kind: str, expected: str) -> Iterator[None]:
    """Re-raise any error of torch's exporter, or of the model that it runs, as an
    ExportError in one line that says what was `expected`. The full error is logged for
    debugging."""
    try:
        yield
    except (CompressError, OSError, MemoryError):
        raise
    except Exception as error:  # whatever is in a model's code may fail in its own way
        logging.getLogger(__name__).debug("%s cannot be exported", kind, exc_info=error)
        raise ExportError(
            f"{kind}: cannot be exported to ONNX ({first_reason(error)}); expected "
            f"{expected}. Otherwise {ANOTHER_FAMILY}"
        ) from error


def export_graph(
    module: nn.Module,
    inputs: Tensors,
    path: Path,
    *,
    opset: int,
    outputs: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
) -> None:
    """Trace a module and write its graph; `axes`: the names of its dynamic sizes."""
    # Warnings of the tracer and the exporter are checked on the file itself; the graph
    # that is printed for an operator without a counterpart would fill the screen, or
    # break our JSON
    with quiet(), torch.no_grad():
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            path,
            dynamo=False,
            opset_version=opset,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=axes,
        )


def traced_shape(config: Any, longest: int) -> Probe:
    """Return the shape at which a model is traced so that its graph also holds for
    texts of `longest` tokens.

    A family may need more than TRACED for this (`Family.traced_distance`).
    """
    rows, tokens = TRACED
    tokens = min(tokens, longest)
    distance = families.find(config.model_type).traced_distance(config)
    if distance is not None and distance < longest:
        tokens = distance + 1
    return Probe(rows, tokens)


def _trace(plain: Any, batch: Tensors, path: Path, opset: int) -> None:
    with tracing(
        type(plain).__name__,
        "an encoder, alone or with a head, as transformers' Auto classes load it",
    ):
        _set_implementations(plain)
        with torch.no_grad():
            answers = outputs_of(plain(**batch))
        if not answers:
            raise LookupError("its output has neither logits nor hidden states")
        sizes = {0: "batch_size", 1: "sequence_length"}
        axes = dict.fromkeys(batch, sizes) | dict.fromkeys(answers, sizes)
        once = [
            name
            for name in ("logits", "sentence_embedding")
            if name in answers and answers[name].dim() == 2
        ]
        axes |= {name: {0: "batch_size"} for name in once}
        inputs = dict(batch)
        traced = TracedModel
        if PROMPT_LENGTH in batch:
            traced = TracedSentenceEncoder
            order = ("input_ids", "attention_mask", PROMPT_LENGTH, "token_type_ids")
            inputs = {name: batch[name] for name in order if name in batch}
            axes[PROMPT_LENGTH] = {0: "batch_size"}
        export_graph(
            traced(plain), inputs, path, opset=opset, outputs=list(answers), axes=axes
        )


def _set_implementations(plain: Any) -> None:
    """Let every part of a model compute in operators that ONNX has. A sentence
    encoder's parts have configs of their own, and only families with experts have an
    implementation of them to choose: the default ones sort tokens."""
    for part in plain.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation("eager")
            with suppress(ValueError):
                part.set_experts_implementation("batched_mm")


@dataclass(frozen=True)
class _Compared:
    """The largest difference of a file's answers from the model's, and the model's
    largest answer."""

    largest: float
    answer: float

    @property
    def equal(self) -> bool:
        return self.largest <= ONNX_TOLERANCE * max(1.0, self.answer)  # False for NaN


def _draw(model: nn.Module, shape: Probe, *, segments: bool) -> TensorDict:
    """Draw random inputs; for a sentence encoder that leaves out prompts, they begin
    with prompts of 1 and 2 tokens, but always end with a token of the text."""
    batch = probes.draw(model, shape, segments=segments)
    if isinstance(model, SentenceEncoder) and model.settings.leaves_out_prompts:
        batch[PROMPT_LENGTH] = (torch.arange(shape.rows) % 2 + 1).clamp(
            max=shape.tokens - 1
        )
    return batch


def _check(
    model: nn.Module, path: Path, shapes: Sequence[Probe], *, segments: bool
) -> None:
    """Raise ExportError, naming the text, unless the file computes the same as the
    model at each of these shapes."""
    kind = type(model).__name__
    try:
        session = open_session(path)
    except ExportError as error:
        reason = runtime_reason(error.__cause__ or error)
        raise ExportError(
            f"{kind}: its graph cannot be opened ({reason}); {ANOTHER_FAMILY}"
        ) from error
    exact = 0
    for shape in shapes:
        batch = _draw(model, shape, segments=segments)
        remedy = (
            f"give max_length {exact}, up to which the answers are equal"
            if exact >= USEFUL
            else ANOTHER_FAMILY
        )
        try:
            expected = _answer(model, batch)
        except ExportError:
            # the model has no answer to compare the file's with
            if shape.tokens < READABLE:
                continue
            raise
        try:
            found = _compare(session, batch, expected)
        except UNOPENED as error:
            reason = runtime_reason(error)
            raise ExportError(
                f"{kind}: its graph cannot be run on {shape} ({reason}); {remedy}"
            ) from error
        if not found.equal:
            raise ExportError(
                f"{kind}: the ONNX file's logits differ from the model's by "
                f"{found.largest:.2g} on {shape}, where the largest is "
                f"{found.answer:.2g}; expected at most {ONNX_TOLERANCE:g} of it. The "
                "weights may hold NaN, or the graph holds for some lengths only; "
                f"{remedy}"
            )
        exact = shape.tokens


def _answer(model: nn.Module, inputs: Tensors) -> dict[str, Floats]:
    """Compute the model's answers in float32 on the CPU, by the names of the file's
    outputs.

    The model is copied for each text: BigBird, and rotary positions that scale with the
    length of texts, change after a text of another length.
    """
    plain = as_float32(model)
    with (
        torch.no_grad(),
        tracing(type(model).__name__, "a model that can read this text itself"),
    ):
        answers = plain(**{name: tensor.cpu() for name, tensor in inputs.items()})
    return {name: tensor.numpy() for name, tensor in outputs_of(answers).items()}


def _compare(
    session: InferenceSession,
    batch: Tensors,
    expected: Mapping[str, Floats],
) -> _Compared:
    """Compare the file's answers to a batch with the expected ones; answers to padding
    do not count."""
    names = [node.name for node in session.get_inputs()]
    names += [
        node.name
        for node in session.get_overridable_initializers()
        if node.name in batch
    ]
    feeds = {name: batch[name].cpu().numpy() for name in names}
    found = session.run(list(expected), feeds)
    real = batch["attention_mask"].cpu().numpy() == 1
    differences: list[float] = []
    sizes: list[float] = []
    for one, other in zip(found, expected.values(), strict=True):
        per_token = other.ndim == 3 or "start_logits" in expected
        if one.shape != other.shape:
            raise ExportError(
                f"answers are of shape {one.shape}, the model's {other.shape}; "
                f"{ANOTHER_FAMILY}"
            )
        ours, models = (one[real], other[real]) if per_token else (one, other)
        with np.errstate(invalid="ignore"):  # inf - inf
            differences.append(float(np.abs(ours - models).max()))
        sizes.append(float(np.abs(models).max()))
    return _Compared(float(np.max(differences)), float(np.max(sizes)))


def makes_segments(tokenizer: Any) -> bool:
    """Check that this tokenizer's rows have token types."""
    return "token_type_ids" in tokenizer.model_input_names


def _read_shared_weights(graph: onnx.GraphProto) -> None:
    """Remove the Identity nodes through which the exporter lets layers read a shared
    weight: quantisation looks for weights that are read directly."""
    weights = {tensor.name for tensor in graph.initializer}
    copies: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        node.input[:] = [copies.get(name, name) for name in node.input]
        if node.op_type == "Identity" and node.input[0] in weights:
            copies[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)
