"""Zafrir et al. 2019, "Q8BERT: Quantized 8Bit BERT", arXiv:1910.06188.

Eq. 1, 2  weights             Clamp(round(W S), -M, M) with S = M / max|W|, M = 127, as
                              the float it stands for
Eq. 3     activations         the same for the inputs of a layer, with a range that is
                              an exponential moving average over training
Sec. 2    QuantizationAware   fine-tuning in which every linear layer computes with
                              both, and embeddings are read from rounded tables;
                              gradients pass the rounding. `requantise: true` rounds the
                              outputs of a layer too, as the authors' code does by
                              default (nlp_architect, nn/torch/quantization.py)

Shapes: B examples, L tokens, D a layer's inputs, O its outputs.

Deviations:
- from the paper, as in the exported int8 file (compress.exporters.int8): one scale for
  each output of a layer instead of one for its matrix; in training
  `portable_weights`, so that processors without VNNI add exactly; activations and
  tables from 0 to 255 between two ends instead of symmetric ones.
- from the authors' code, as in that file: biases are not rounded; theirs are to int32
  at inference.
- from the authors' code: `decay` is 0.9; theirs is 0.9999 (`ema_decay`), which over the
  hundreds of steps of a stage here would retain little but the first batch's range.
- from the paper: layers that read one vector per example (pooler, classifier) stay
  float, as they take no time.
- from the paper: the gradient is 1 inside an activation's range and 0 outside (torch's
  straight-through estimator); theirs is 1.
- from the authors' code: padding does not affect the ranges, as the file reads its rows
  unpadded.
- from the paper: the objective is the stage's, which may distil; theirs is the task's
  loss on labels.
- ours: one range for a layer that is called several times (ALBERT); the file uses it
  for each call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad
from transformers import PreTrainedModel

from compress.errors import ObjectiveError
from compress.training.objective import Objective
from compress.training.step import Distillation, WrappedStep

M = 127
INT8_LEVELS = 255
TINY = 1e-12
"""The least width of a range: a layer that reads nothing but zeros has a scale too."""


def weights(W_OD: Tensor) -> Tensor:
    """Round W to int8 and back, in float32: round(W S) / S with S = M / max|W| of each
    output's row."""
    return _round_rows(W_OD, W_OD.detach().abs().amax(1))


def portable_weights(W_OD: Tensor) -> Tensor:
    """Round W as the exported file does: S = M / the largest sum of neighbours of one
    sign in each output's row (see `exporters.int8.add_neighbours`)."""
    padded_OD = pad(W_OD.detach(), (0, W_OD.shape[1] % 2))
    signs_2OD = torch.stack([padded_OD, -padded_OD]).clamp(min=0)
    sums_2O = (signs_2OD[..., 0::2] + signs_2OD[..., 1::2]).amax(2)
    return _round_rows(W_OD, sums_2O.amax(0))


def _round_rows(W_OD: Tensor, largest_O: Tensor) -> Tensor:
    scale_O = largest_O.float().clamp(min=TINY) / M
    zero_O = torch.zeros_like(scale_O).int()
    return torch.fake_quantize_per_channel_affine(
        W_OD.float(), scale_O, zero_O, 0, -M, M
    )


def activations(x_BLD: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Round x to uint8 and back, in float32, between low <= 0 and high >= 0; values
    outside are clamped."""
    scale = (high - low).clamp(min=TINY) / INT8_LEVELS
    return torch.fake_quantize_per_tensor_affine(
        x_BLD.float(), scale, (-low / scale).round().int(), 0, INT8_LEVELS
    )


class QuantizationAware(WrappedStep):
    """step(**batch) -> `objective`, with a student that simulates int8.

    Every linear layer that reads tokens rounds its weights and inputs, every embedding
    its table. `decay` belongs to the moving average, over steps, of the least and
    largest input, which begins with the first batch. With `requantise`, outputs are
    rounded likewise, by their own ranges. `finish` turns the student into a plain model
    again, whose config has `activation_ranges`, layer -> [low, high] of its inputs, and
    of its outputs if they are rounded, from which the bundle's int8 file is made.
    Raises ObjectiveError for a student without linear layers.
    """

    wraps = "minimise"

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective,
        *,
        decay: float = 0.9,
        requantise: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ObjectiveError(
                f"q8bert.QuantizationAware: decay is {decay}; expected a number from 0 "
                "to below 1"
            )
        self.minimise = Distillation(student, teacher, objective)
        kinds: dict[type[nn.Module], Callable[[Any], nn.Module]]
        kinds = {
            nn.Linear: lambda layer: Int8Linear(layer, decay, requantise=requantise),
            nn.Embedding: Int8Embedding,
        }
        self._plain = {
            name: each for name, each in student.named_modules() if type(each) in kinds
        }
        if not any(isinstance(each, nn.Linear) for each in self._plain.values()):
            raise ObjectiveError(
                f"q8bert.QuantizationAware: {type(student).__name__} has no linear "
                "layers to quantise (GPT-2's are convolutions); expected an encoder or "
                "T5"
            )
        for name, layer in self._plain.items():
            student.set_submodule(name, kinds[type(layer)](layer))

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        for layer in self._layers().values():
            layer.real_BL = batch["attention_mask"].bool()
        return super().forward(**batch)

    def finish(self) -> None:
        ranges = {
            name: layer.ranges_R2.flatten().tolist()
            for name, layer in self._layers().items()
            if layer.seen
        }
        self.student.config.activation_ranges = ranges
        for name, layer in self._plain.items():
            self.student.set_submodule(name, layer)

    def _layers(self) -> dict[str, "Int8Linear"]:
        return {
            name: layer
            for name, layer in self.student.named_modules()
            if isinstance(layer, Int8Linear)
        }


class Int8Linear(nn.Module):
    """y = Q(x) Q(W)^T + b, or with `requantise` Q(y), with the parameters of the linear
    layer that it replaces.

    ranges_R2      lowest and highest input and, with `requantise`, output; nan before
                   training
    round_weights  Q of the weights
    """

    ranges_R2: Tensor

    def __init__(
        self,
        layer: nn.Linear,
        decay: float,
        *,
        requantise: bool = False,
        round_weights: Callable[[Tensor], Tensor] = portable_weights,
    ) -> None:
        super().__init__()
        self.round_weights = round_weights
        self.weight = layer.weight
        self.bias = layer.bias
        self.decay = decay
        self.real_BL: Tensor | None = None
        self.register_buffer(
            "ranges_R2",
            torch.full((1 + requantise, 2), torch.nan, device=layer.weight.device),
        )

    @property
    def seen(self) -> bool:
        """True if it has read tokens during training."""
        return not bool(self.ranges_R2.isnan().any())

    def forward(self, x: Tensor) -> Tensor:
        """Compute (B, L, O) from x (B, L, D); inputs of other shapes are not tokens and
        are not rounded."""
        if x.dim() != 3 or not (self.training or self.seen):
            return linear(x, self.weight, self.bias)
        rounded_OD = self.round_weights(self.weight)
        y = linear(self._round(x, self.ranges_R2[0]), rounded_OD, self.bias)
        return y if len(self.ranges_R2) == 1 else self._round(y, self.ranges_R2[1])

    def _round(self, x_BLD: Tensor, range_2: Tensor) -> Tensor:
        if self.training:
            real = self.real_BL is not None and self.real_BL.shape == x_BLD.shape[:2]
            real_TD = (
                (x_BLD[self.real_BL] if real else x_BLD.flatten(0, 1)).detach().float()
            )
            now_2 = torch.stack(
                [real_TD.amin().clamp(max=0), real_TD.amax().clamp(min=0)]
            )
            range_2.copy_(
                torch.where(range_2.isnan(), now_2, now_2.lerp(range_2, self.decay))
            )
        return activations(x_BLD, *range_2)


class Int8Embedding(nn.Module):
    """The rows of Q(table), with the parameters of the embedding that it replaces."""

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__()
        self.weight = layer.weight
        self.padding_idx = layer.padding_idx
        self.num_embeddings = layer.num_embeddings
        self.embedding_dim = layer.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        ends = (
            self.weight.detach().float().amin().clamp(max=0),
            self.weight.detach().float().amax().clamp(min=0),
        )
        return activations(embedding(ids, self.weight, self.padding_idx), *ends)
