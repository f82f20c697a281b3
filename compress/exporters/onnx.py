"""Export an encoder with a task head as fp32 ONNX, and prove that the file computes what the model does.

The graph is left unfused, from the TorchScript exporter under eager attention: onnxruntime's own session optimiser
makes that form the fastest on a CPU, and it is the one `quantize_dynamic` can read (graphs of the dynamo exporter
fail its shape inference). It is rewritten so that it computes only what the answer reads (`exporters.rewrite`).
The attention mask is computed by us, explicitly, so that no version of transformers puts its own mask code into the
file.
"""

import copy
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from compress.errors import ExportError
from compress.exporters.rewrite import SHIPPED, Form, rewrite_graph
from compress.exporters.session import (
    PROMPT_LENGTH,
    SESSION_KEY,
    SESSION_WHY_KEY,
    UNFUSED_SKIP,
    UNFUSED_SKIP_WHY,
    open_session,
)
from compress.io import atomic_file
from compress.models.sentence_encoder import SentenceEncoder
from compress.provenance import versions
from compress.slicing.rules import GROUPED

PROTOBUF_LIMIT = 2**31
MASKED = -1e4
"""Added to the scores of masked tokens: exp() of it is 0 in float32, and unlike float32's lowest it cannot overflow."""

SQUARES_ITS_MASK = ("deberta", "deberta-v2", "static-embedding", "xlm", "xlnet")
"""Model types that need the mask as (batch, tokens): their attention makes a pair mask of it, or they have no attention
and take a mean over the tokens."""

LOOKS_BACK = ("gpt2", *GROUPED)
"""Model types with causal attention; a prepared mask has to be causal too."""

SEGMENTS_UNCOUNTED = ("xlm", "xlnet")
"""Model types that read token types without a `type_vocab_size` in their config."""

OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state", "sentence_embedding")
"""The names that the hub's tools expect of a file's outputs."""

TOLERANCE = 1e-3
"""The most that a file's logits may differ from the model's, relative to the largest (or 1): float32 noise is 1e-6."""

TRACED = (2, 5)
PROBES = ((1, 2), (3, 7))
"""The (rows, tokens) at which the graph is traced, and the others at which the file is checked."""


def to_onnx(
    model: nn.Module, path: Path, *, opset: int = 17, segments: bool = True, form: Form | None = SHIPPED
) -> None:
    """Export a model to the ONNX file `path`.

    Inputs   input_ids, attention_mask, and token_type_ids where the model has segments and the tokenizer makes
             `segments`; each (batch_size, sequence_length) int64
    Outputs  logits float32 (batch_size, outputs), or (batch_size, sequence_length, outputs) of a head that answers per
             token; start_logits and end_logits (batch_size, sequence_length) of one that answers with spans; of an
             encoder last_hidden_state (batch_size, sequence_length, hidden), and sentence_embedding (batch_size,
             width) of a sentence encoder
    Optional prompt_length int64 (batch_size,) of a sentence encoder that does not pool the tokens of prompts: how many
             tokens a prompt takes at the beginning; 0 where it is not given, as runtimes that know nothing of it do
    form     how the graph is rewritten (`rewrite.rewrite_graph`, which needs opset 13); None: it stays as traced

    The model stays as it was: mode, attention implementation, dtype, device. Raises ExportError when the model cannot
    be exported, is over 2 GB, or when the file's logits are not the model's (checked at other shapes than the traced
    one: a tracer that takes a size for a constant only warns).
    """
    check_size(model)
    plain = as_float32(model)
    probes = [probe(plain.config, rows, tokens, segments) for rows, tokens in (TRACED, *PROBES)]
    if isinstance(plain, SentenceEncoder) and plain.settings.leaves_out_prompts:
        for each in probes:
            each[PROMPT_LENGTH] = torch.arange(len(each["input_ids"])) % 2 + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial:
        _trace(plain, probes[0], partial, opset)
        file = onnx.load_model(partial)
        _read_shared_weights(file.graph)
        if PROMPT_LENGTH in probes[0]:
            file.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1, np.int64), PROMPT_LENGTH))
        file.producer_name, file.producer_version = "compress", versions(["compress"])["compress"]
        config = plain.config
        properties = {
            "compress.version": file.producer_version,
            "compress.model_type": config.model_type,
            "compress.task": config.problem_type or "",
            "compress.labels": json.dumps([config.id2label[index] for index in range(config.num_labels)]),
            SESSION_KEY: json.dumps(UNFUSED_SKIP),
            SESSION_WHY_KEY: UNFUSED_SKIP_WHY,
        }
        onnx.helper.set_model_props(file, properties)
        if form is not None:
            file = rewrite_graph(file, form).model
        onnx.save_model(file, partial)
        difference, largest = _compare(model, partial, probes[1:])
        if not difference <= TOLERANCE * max(1.0, largest):  # so that NaN fails too
            raise ExportError(
                f"{type(model).__name__}: the ONNX file's logits differ from the model's by {difference:.2g} where the "
                f"largest is {largest:.2g}; expected at most {TOLERANCE:g} of it. The weights may hold NaN, or this "
                "architecture cannot be traced: please report it with its config.json."
            )


def check_size(model: nn.Module, name: str = "") -> None:
    """Raise ExportError, naming the model or its class, where its weights do not fit into an ONNX file."""
    if (size := 4 * sum(parameter.numel() for parameter in model.parameters())) >= PROTOBUF_LIMIT:
        name = name or type(model).__name__
        raise ExportError(f"{name}: {size / 1e9:.1f} GB of float32 weights; an ONNX file holds at most 2 GB")


def parity(model: nn.Module, path: Path, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """Compute the largest |logit difference| between the model, in float32 on the CPU, and the file under onnxruntime.

    A batch holds at least the file's inputs, (rows, tokens); other keys are ignored. The model stays as it was.
    NaN when any logit is; raises ExportError when there is no batch.
    """
    return _compare(model, path, batches)[0]


def as_float32(model: nn.Module) -> Any:
    """Copy the model in float32, in eval mode, on the CPU: modules and config are copies, the weights are shared
    where they already are float32 on the CPU. Nothing done to its modules or config reaches the original."""
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("cpu", torch.float32), requires_grad=False)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, shared).to("cpu").float().eval()


class TracedModel(nn.Module):
    """The module that is traced: reads ids and a 0/1 mask, returns the tensors of `outputs_of`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.more: dict[str, Tensor] = {}
        # a classifier of ModernBERT that takes a mean over the tokens reads the mask too
        self.masks_inside = getattr(model.config, "classifier_pooling", "") == "mean" and hasattr(model, "classifier")
        if self.masks_inside:
            model.base_model.register_forward_pre_hook(_prepare_inside, with_kwargs=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Any:
        ends, config = attention_mask, self.model.config
        unprepared = self.masks_inside or config.model_type in SQUARES_ITS_MASK
        mask = attention_mask if unprepared else prepare_mask(attention_mask, config, self.model.dtype)
        if config.is_encoder_decoder:  # T5 classifies at the end of a text; ids drawn at random may lack it
            last_B1 = ends.sum(1, keepdim=True) - 1
            input_ids = input_ids.scatter(1, last_B1, torch.full_like(last_B1, config.eos_token_id))
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return tuple(outputs_of(self.model(input_ids=input_ids, attention_mask=mask, **segments, **self.more)).values())


class TracedSentenceEncoder(TracedModel):
    """The same for a sentence encoder that does not pool the tokens of prompts."""

    def forward(  # type: ignore[override]  # the tracer passes inputs by their place
        self, input_ids: Tensor, attention_mask: Tensor, prompt_length: Tensor, token_type_ids: Tensor | None = None
    ) -> Any:
        self.more = {PROMPT_LENGTH: prompt_length}
        return super().forward(input_ids, attention_mask, token_type_ids)


def _prepare_inside(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask = kwargs["attention_mask"]
    if isinstance(mask, Tensor) and mask.dim() == 2:
        kwargs = {**kwargs, "attention_mask": prepare_mask(mask, encoder.config, encoder.dtype)}
    return args, kwargs


def prepare_mask(mask_BL: Tensor, config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Compute the mask that is added to the scores (batch, 1, 1 or tokens, tokens): one, or one per kind of layer."""
    seen = mask_BL[:, None, None, :]
    kinds = getattr(config, "layer_types", None)
    if looks_back := config.model_type in LOOKS_BACK:
        seen = seen * torch.ones_like(seen.expand(-1, -1, seen.shape[-1], -1)).tril()
    full = (1.0 - seen.to(dtype)) * MASKED
    if "sliding_attention" not in (kinds or ()) and (config.model_type != "mistral" or config.sliding_window is None):
        return full
    place_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    apart_LL = place_L[:, None] - place_L[None, :]
    far_LL = apart_LL >= config.sliding_window if looks_back else apart_LL.abs() > config.sliding_window
    near = (full + far_LL * MASKED).clamp(min=MASKED)
    return {"full_attention": full, "sliding_attention": near} if kinds else near  # Mistral's layers are all alike


def outputs_of(out: Any) -> dict[str, Tensor]:
    """Select the tensors of a model's output that the file has, by their names in OUTPUTS."""
    return {name: out[name] for name in OUTPUTS if name in out}


@contextmanager
def tracing(kind: str, expected: str) -> Iterator[None]:
    """Re-raise any error of torch's exporter as an ExportError that says what was `expected`."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        raise ExportError(
            f"{kind}: cannot be exported to ONNX ({type(error).__name__}: {error}); expected {expected}"
        ) from error


def export_graph(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    path: Path,
    *,
    opset: int,
    outputs: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
) -> None:
    """Trace a module and write its graph; `axes`: the names of its dynamic sizes."""
    # What the tracer and the exporter warn of is checked on the file itself
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
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


def _trace(plain: Any, batch: Mapping[str, Tensor], path: Path, opset: int) -> None:
    plain.set_attn_implementation("eager")
    with tracing(type(plain).__name__, "an encoder, alone or with a head, as transformers' Auto classes load it"):
        with torch.no_grad():
            answers = outputs_of(plain(**batch))
        if not answers:
            raise LookupError("its output has neither logits nor hidden states")
        sizes = {0: "batch_size", 1: "sequence_length"}
        axes = dict.fromkeys(batch, sizes) | dict.fromkeys(answers, sizes)
        once = [name for name in ("logits", "sentence_embedding") if name in answers and answers[name].dim() == 2]
        axes |= {name: {0: "batch_size"} for name in once}
        inputs, traced = dict(batch), TracedModel
        if PROMPT_LENGTH in batch:
            traced = TracedSentenceEncoder
            order = ("input_ids", "attention_mask", PROMPT_LENGTH, "token_type_ids")
            inputs = {name: batch[name] for name in order if name in batch}
            axes[PROMPT_LENGTH] = {0: "batch_size"}
        export_graph(traced(plain), inputs, path, opset=opset, outputs=list(answers), axes=axes)


def _compare(model: nn.Module, path: Path, batches: Iterable[Mapping[str, Tensor]]) -> tuple[float, float]:
    """Compute the largest difference, and the model's largest logit."""
    plain = as_float32(model)
    session = open_session(path)
    names = [node.name for node in session.get_inputs()]
    optional = [node.name for node in session.get_overridable_initializers()]
    differences, sizes = [], []
    with torch.no_grad():
        for batch in batches:
            inputs = {name: batch[name].cpu() for name in (*names, *optional) if name in batch or name in names}
            expected = {name: tensor.numpy() for name, tensor in outputs_of(plain(**inputs)).items()}
            found = session.run(list(expected), {name: tensor.numpy() for name, tensor in inputs.items()})
            real = inputs["attention_mask"].numpy() == 1
            for one, other in zip(found, expected.values(), strict=True):
                per_token = other.ndim == 3 or "start_logits" in expected
                ours, models = (one[real], other[real]) if per_token else (one, other)
                with np.errstate(invalid="ignore"):  # inf - inf
                    differences.append(np.abs(ours - models).max())
                sizes.append(np.abs(models).max())
    if not differences:
        raise ExportError(f"{path}: parity needs at least one batch")
    return float(np.max(differences)), float(np.max(sizes))


def makes_segments(tokenizer: Any) -> bool:
    """Check that this tokenizer's rows have token types."""
    return "token_type_ids" in tokenizer.model_input_names


def probe(config: Any, rows: int, tokens: int, segments: bool) -> dict[str, Tensor]:
    """Draw random inputs, in the order of the file's; the end of the first row is masked."""
    ids = torch.randint(config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, tokens // 2 + 1 :] = 0
    if config.is_encoder_decoder:  # T5 classifies at the end of a text, of which each row has one
        ids = ids.where(ids != config.eos_token_id, config.pad_token_id)
        ids.scatter_(1, mask.sum(1, keepdim=True) - 1, config.eos_token_id)
    batch = {"input_ids": ids.where(mask == 1, config.pad_token_id or 0), "attention_mask": mask}
    if segments and (getattr(config, "type_vocab_size", 0) > 1 or config.model_type in SEGMENTS_UNCOUNTED):
        batch["token_type_ids"] = torch.arange(tokens).ge(tokens // 2).long().expand(rows, tokens).contiguous()
    return batch


def _read_shared_weights(graph: onnx.GraphProto) -> None:
    """Remove the Identity through which the exporter lets layers read a weight that they share: quantisation looks for
    weights that are read directly."""
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
