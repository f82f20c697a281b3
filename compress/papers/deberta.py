"""He et al. 2021, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention",
arXiv:2006.03654.

Sec. 3.2  enhanced_mask_decoder     the last layer again, with absolute positions in its
                                    queries
Sec. 3.2  EnhancedMaskDecoder       step: masked language modelling through the decoder
Sec. 5    symmetric_kl, squared     distance of the answers on perturbed embeddings from
                                    those on clean ones
Sec. 5    ScaleInvariantFineTuning  step: SiFT, virtual adversarial training on
                                    normalised embeddings

The disentangled attention itself, and v2's logarithmic buckets of distances, are
transformers' (`family: deberta-v2`; v1 is its form without buckets and shared
projections).

Shapes: B examples, L tokens, R labelled positions, D hidden, V classes or vocabulary.

Deviations
- `family: deberta` has no enhanced mask decoder: transformers' layer of that family
  fails on query states. The v2 class computes v1's attention with `share_att_key:
  false` and no `position_buckets`.
- A.3's spans of up to three words are albert.mask's: n-grams drawn over the whole row
  until 15 % of its tokens are chosen. The authors' code draws one in each stretch of
  six times its length.
- rows are whole sentences of one document; the authors' code cuts one text of all
  documents every 510 tokens.
- the decoder's position embedding belongs to the step and is discarded with it:
  transformers has no place for it if `position_biased_input` is false, and no task
  reads it.
- SiFT, from the authors' code: the clean pass does not normalise twice (LayerNorm does
  not change a normalised vector, up to epsilon), so weight 0 is plain fine-tuning.
  symmetric_kl is the divergence, theirs two cross entropies; gradients are the same. A
  regression uses the squared error in both passes, theirs the symmetric KL in the
  second, which is 0 for one output. Independent labels, which the paper does not have,
  are two-class distributions.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, mse_loss
from transformers import DebertaV2ForMaskedLM, PreTrainedModel

from compress.data.constants import IGNORE_INDEX
from compress.errors import ObjectiveError, StudentError
from compress.models.signals import logits_of, read
from compress.papers.bert import masked_lm
from compress.papers.hinton import kl_of_logs, mean_over
from compress.tensors import TensorDict, Tensors
from compress.training.objective import (
    Objective,
    count_items,
    weigh_part,
)
from compress.training.reads import reads
from compress.training.step import Distillation, Score, Step, WrappedStep

NORM_EPS = 1e-7


def enhanced_mask_decoder(
    encoder: Any, hidden_BLD: Tensor, positions_BLD: Tensor, mask_BL: Tensor
) -> Tensor:
    """Apply the last layer twice: keys and values from H, queries first Q0 = H + P and
    then the layer's output.

    encoder: a DebertaV2Encoder. hidden_BLD: H, the input of its last layer.
    positions_BLD: P, of B texts or of all.
    """
    mask_B1LL = encoder.get_attention_mask(mask_BL)
    relative = encoder.get_rel_pos(hidden_BLD)
    query_BLD = hidden_BLD + positions_BLD
    for _ in range(2):
        query_BLD = encoder.layer[-1](
            hidden_BLD,
            mask_B1LL,
            query_states=query_BLD,
            relative_pos=relative,
            rel_embeddings=encoder.get_rel_embedding(),
        )[0]
    return query_BLD


class MaskDecoder(nn.Module):
    """batch -> (R, V) logits of `model` at the labelled positions, decoded with the
    decoder's own positions.

    model: a DebertaV2ForMaskedLM without positions in its input. Raises StudentError.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        if not isinstance(model, DebertaV2ForMaskedLM):
            raise StudentError(
                "the enhanced mask decoder needs a DebertaV2ForMaskedLM, not "
                f"{type(model).__name__}: give the stage `head: masked_lm` and the "
                "student `family: deberta-v2`"
            )
        config: Any = model.config
        if config.position_biased_input:
            raise StudentError(
                "the enhanced mask decoder adds positions after the layers, but this "
                "student has them in its input; set student: {config: "
                "{position_biased_input: false}}"
            )
        self.model = model
        self.positions = nn.Embedding(
            config.max_position_embeddings, config.hidden_size
        )
        nn.init.normal_(self.positions.weight, std=config.initializer_range)

    def forward(self, batch: Tensors) -> Tensor:
        return self.logits_at(batch, batch["labels"] != IGNORE_INDEX)

    def logits_at(self, batch: Tensors, at_BL: Tensor) -> Tensor:
        """Compute the logits (R, V) at the positions that are True, in row order."""
        model: Any = self.model
        shown = read(model.base_model, batch, frozenset({"layers"}))
        # the state under the last layer: with a single layer, the embeddings
        below_BLD = shown.hidden[-2]
        # padding may stand before the text
        places_BL = (shown.mask_BL.cumsum(1) - 1).clamp_min(0)
        decoded_BLD = enhanced_mask_decoder(
            model.base_model.encoder,
            below_BLD,
            self.positions(places_BL),
            shown.mask_BL,
        )
        chosen_RD = decoded_BLD[at_BL]
        if hasattr(model, "cls"):
            logits_RV: Tensor = model.cls(chosen_RD)
        else:
            logits_RV = model.lm_predictions(chosen_RD, model.get_input_embeddings())
        return logits_RV


class EnhancedMaskDecoder(Step):
    """step(**batch) -> L_MLM through the enhanced mask decoder, of a batch with masked
    tokens and their labels.

    Raises StudentError if the student has no such decoder, ObjectiveError if the stage
    has an objective.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective | None,
    ) -> None:
        super().__init__()
        if objective is not None:
            raise ObjectiveError(
                "deberta.EnhancedMaskDecoder minimises bert.masked_lm: leave "
                "`objective` out"
            )
        self.decoder = MaskDecoder(student)

    @property
    def student(self) -> PreTrainedModel:
        return self.decoder.model

    def forward(self, **batch: Any) -> TensorDict:
        if "labels" not in batch:
            raise ObjectiveError(
                "deberta.EnhancedMaskDecoder needs masked text: give the stage "
                "`corrupt: bert.mask`"
            )
        labels_R = batch["labels"][batch["labels"] != IGNORE_INDEX]
        loss = masked_lm(self.decoder(batch), labels_R, None)
        if "items" in batch:
            loss = weigh_part(loss, len(labels_R), batch["items"]["label"])
        return {"loss": loss, "bert.masked_lm": loss.detach()}

    def wrap_score(self, score: Score) -> Score:
        """Score through the decoder: the head is not trained on the student's own last
        layer."""
        decoder: Any = self.decoder
        return lambda student: score(decoder)

    def items(self, batch: Tensors) -> TensorDict:
        return count_items(batch["attention_mask"], batch.get("labels"))


@reads("logits", per="example")
def symmetric_kl(
    student_BV: Tensor, target_BV: Tensor, mask_BL: Tensor | None
) -> Tensor:
    """KL(p_T || p_S) + KL(p_S || p_T), mean over examples.

    The left distribution of each is a constant, so that student and target move towards
    each other.
    """
    log_s_BV = student_BV.float().log_softmax(-1)
    log_t_BV = target_BV.float().log_softmax(-1)
    forward_B = kl_of_logs(log_t_BV.detach(), log_s_BV)
    backward_B = kl_of_logs(log_s_BV.detach(), log_t_BV)
    return mean_over(forward_B + backward_B, None)


@reads("logits", per="example")
def squared(student_BV: Tensor, target_BV: Tensor, mask_BL: Tensor | None) -> Tensor:
    """(z_S - z_T)^2, mean over outputs and examples."""
    return mse_loss(student_BV.float(), target_BV.float())


class ScaleInvariantFineTuning(WrappedStep):
    """step(**batch) -> `objective` + weight * distance(answers on perturbed embeddings,
    answers on clean ones).

    The perturbation is added to the normalised input of the embeddings' LayerNorm. It
    is drawn from a normal distribution with standard deviation `start`, clipped at
    twice that, and takes one step of `step_size` in the direction that changes the
    answers most, with each token's gradient scaled to a largest component of 1.
    Defaults are those of the authors' code (experiments/glue/mnli.sh). The distance is
    symmetric_kl, or squared for a regression. Raises StudentError if there is no such
    LayerNorm.
    """

    wraps = "minimise"

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective,
        *,
        weight: float = 5.0,
        step_size: float = 1e-4,
        start: float = 1e-2,
    ) -> None:
        super().__init__()
        if "logits" not in objective.student_wants:
            raise ObjectiveError(
                "deberta.ScaleInvariantFineTuning needs an objective that reads the "
                "student's logits"
            )
        self.minimise = Distillation(student, teacher, objective)
        self.weight = weight
        self.step_size = step_size
        self.start = start
        norms = [
            module
            for name, module in student.named_modules()
            if name.endswith("embeddings.LayerNorm")
        ]
        if len(norms) != 1:
            raise StudentError(
                "deberta.ScaleInvariantFineTuning perturbs the input of "
                f"`embeddings.LayerNorm`; {type(student).__name__} has {len(norms)} of "
                "it"
            )
        self._norm = norms  # in a list: the student registers it already

    def forward(self, **batch: Any) -> TensorDict:
        embedded: list[Tensor] = []
        outputs: list[Any] = []
        with (
            _hooked(
                self._norm[0].register_forward_pre_hook(
                    lambda _, args: embedded.append(args[0])
                )
            ),
            _hooked(
                self.student.register_forward_hook(
                    lambda *call: outputs.append(call[-1])
                )
            ),
        ):
            parts: TensorDict = self.minimise(**batch)
        clean = self._answers(logits_of(outputs[0]), batch)
        normal_BLE = layer_norm(
            embedded[0].detach(), embedded[0].shape[-1:], eps=NORM_EPS
        )
        noise_BLE = self._draw_noise(normal_BLE, clean.detach(), batch)
        distance = self._distance(self._perturb(normal_BLE + noise_BLE, batch), clean)
        adversarial = self.weight * distance
        if "items" in batch:
            # one distribution for each token of a tagging task, one or two for each
            # example of others
            per = "token" if self.minimise.objective.task.word_labels else "example"
            adversarial = weigh_part(
                adversarial, self.items(batch)[per], batch["items"][per]
            )
        return parts | {
            "loss": parts["loss"] + adversarial,
            "deberta.sift": adversarial.detach(),
        }

    def _draw_noise(
        self, normal_BLE: Tensor, clean: Tensor, batch: Mapping[str, Any]
    ) -> Tensor:
        """Draw the perturbation and take its step."""
        noise_BLE = self.start * torch.randn_like(
            normal_BLE, dtype=torch.float32
        ).clamp(-2, 2)
        noise_BLE.requires_grad_()
        distance = self._distance(self._perturb(normal_BLE + noise_BLE, batch), clean)
        # of the sum over rows, so that the 1e-6 of `direction` means the same for any
        # batch size
        (gradient_BLE,) = torch.autograd.grad(distance * len(clean), noise_BLE)
        return (noise_BLE + self.step_size * direction(gradient_BLE)).detach()

    def _perturb(self, embedded_BLE: Tensor, batch: Mapping[str, Any]) -> Tensor:
        with _hooked(
            self._norm[0].register_forward_pre_hook(
                lambda _, args: (embedded_BLE.to(args[0].dtype),)
            )
        ):
            signals = read(self.student, batch, frozenset({"logits"}))
        assert signals.logits is not None
        return self._answers(signals.logits, batch)

    def _answers(self, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Return one distribution (or one number) per row: per example, per token, or
        per start and end."""
        objective = self.minimise.objective
        answers = objective.task.distributions(logits, batch["attention_mask"])
        return cast("Tensor", answers / objective.unit)

    def _distance(self, perturbed: Tensor, clean: Tensor) -> Tensor:
        distance: Callable[..., Tensor] = (
            squared if clean.shape[-1] == 1 else symmetric_kl
        )
        return distance(perturbed, clean, None)


def direction(gradient_BLE: Tensor) -> Tensor:
    """Divide each token's gradient by its largest component, in size."""
    return gradient_BLE / (gradient_BLE.abs().amax(-1, keepdim=True) + 1e-6)


@contextmanager
def _hooked(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()
