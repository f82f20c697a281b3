"""Clark et al. 2020, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than
Generators", arXiv:2003.10555.

Sec. 2    mask                  corruption: 15 % of the tokens are chosen, 85 % of these
                                become [MASK]
Sec. 2    replace               the generator's samples take the places of the chosen
                                tokens
Sec. 2    replaced_tokens       L_Disc, cross entropy of original against replaced, over
                                every real token
(ours)    soft_replaced_tokens  the same against a discriminator teacher's probabilities
Sec. 2    ReplacedTokens        step: L_MLM of the generator + 50 L_Disc, embeddings
                                tied (Sec. 3.2)
App. B    FineTuning            step: an objective with layer-wise decay of the learning
                                rate

Shapes: B examples, L tokens, R chosen positions, N draws per example, V vocabulary.

Deviations
- from the paper and the authors' code: soft_replaced_tokens and every other term of an
  `objective` are additions, for a discriminator that also learns from a teacher. They
  read student and teacher on the text with the samples in it.
- from the authors' code: a position drawn twice counts once in L_MLM; theirs counts it
  twice. The 85 % is decided per position, theirs per draw. At most `rate` of the tokens
  are drawn; theirs also has a ceiling for the whole batch.
- from the paper: a generator of the discriminator's own size may share all of its
  weights (Sec. 3.2; `untied_generator` in their code). Here, as in all of the authors'
  models with a smaller one, only the embeddings are shared: of words, positions and
  types, with their norm, which the paper does not mention. The projection from their
  width to the hidden size is each model's own, and the generator's output layer has the
  table of words as weights.
- from the authors' code: means divide by the count, theirs by the count + 1e-6; Adam
  corrects its bias, theirs does not.
- from the authors' code: rows are whole sentences of one document as a single segment;
  nine in ten of theirs have two segments of it, [CLS] A [SEP] B [SEP], and one in
  twenty is of any length from 5 tokens on.
- FineTuning decays as the authors' code does: decay^(N + 2 - depth) with the embeddings
  at depth 0, layer i of N at i and the head at N + 2, so that already the last layer
  learns at decay^2: they call it a bug, left in for the results that have it (their
  issue 51).
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import ElectraForMaskedLM, ElectraForPreTraining, PreTrainedModel

from compress import families
from compress.config.term import Term
from compress.data.constants import IGNORE_INDEX
from compress.data.masking import Words
from compress.errors import ObjectiveError, StudentError
from compress.models.signals import read
from compress.papers.bert import masked_lm
from compress.papers.hinton import bernoulli_kl, mean_over
from compress.slicing.shape import Shape
from compress.tensors import TensorDict, Tensors
from compress.training.objective import Objective, weigh_part
from compress.training.reads import Fraction, Temperature, reads
from compress.training.step import Distillation, WrappedStep


def mask(
    batch: Tensors,
    words: Words,
    *,
    rate: Fraction = 0.15,
    masked: Fraction = 0.85,
) -> TensorDict:
    """Draw `rate` of each row's tokens with replacement; `masked` of these become
    [MASK], the others stay.

    Labels are the original tokens at the drawn positions. At least one token of a row
    is drawn, but no special token.
    """
    ids_BL = batch["input_ids"]
    real_BL = batch["attention_mask"].bool()
    open_BL = real_BL & ~words.special_V.to(ids_BL.device)[ids_BL]
    draws_B = (rate * real_BL.sum(-1)).round().long().clamp_min(1)
    # a row without candidates needs some distribution to draw from; its draws are
    # dropped below
    weights_BL = open_BL.float() + (~open_BL.any(-1, keepdim=True)).float()
    drawn_BN = torch.multinomial(weights_BL, int(draws_B.max()), replacement=True)
    counted_BN = (
        torch.arange(drawn_BN.shape[1], device=ids_BL.device) < draws_B[:, None]
    )
    chosen_BL = (
        torch.zeros_like(ids_BL).scatter_add(1, drawn_BN, counted_BN.long()) > 0
    ) & open_BL
    hidden_BL = chosen_BL & (torch.rand(ids_BL.shape, device=ids_BL.device) < masked)
    return dict(batch) | {
        "input_ids": ids_BL.masked_fill(hidden_BL, words.need_mask("electra.mask")),
        "labels": ids_BL.masked_fill(~chosen_BL, IGNORE_INDEX),
    }


@torch.no_grad()
def replace(
    ids_BL: Tensor, labels_BL: Tensor, logits_RV: Tensor, temperature: Temperature = 1.0
) -> tuple[Tensor, Tensor]:
    """Sample x^corrupt (Sec. 2); return it, and a mask that is 1 where it differs from
    the original text.

    Each labelled position gets a token from softmax(z / temperature); a sample equal to
    the original is not a replacement.
    """
    chosen_BL = labels_BL != IGNORE_INDEX
    original_BL = torch.where(chosen_BL, labels_BL, ids_BL)
    probabilities_RV = (logits_RV.float() / temperature).softmax(-1)
    corrupt_BL = original_BL.masked_scatter(
        chosen_BL, torch.multinomial(probabilities_RV, 1).to(ids_BL.dtype)
    )
    return corrupt_BL, (corrupt_BL != original_BL).long()


@reads("logits", against="labels", per="token")
def replaced_tokens(student_BL: Tensor, replaced_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """L_Disc: -log sigmoid(z) where a token is replaced (1), -log sigmoid(-z) where not
    (0), mean over real tokens.

    [CLS] and [SEP] count, as in the authors' code.
    """
    error_BL = binary_cross_entropy_with_logits(
        student_BL.float(), replaced_BL.float(), reduction="none"
    )
    return mean_over(error_BL, mask_BL)


@reads("logits", per="token")
def soft_replaced_tokens(
    student_BL: Tensor,
    teacher_BL: Tensor,
    mask_BL: Tensor,
    *,
    temperature: Temperature = 1.0,
) -> Tensor:
    """T^2 KL(Bernoulli(sigmoid(z_T / T)) || Bernoulli(sigmoid(z_S / T))), mean over
    real tokens."""
    kl_BL = bernoulli_kl(student_BL, teacher_BL, temperature)
    return temperature**2 * mean_over(kl_BL, mask_BL)


def detection(
    discriminator: PreTrainedModel,
    teacher: nn.Module | None,
    objective: Objective | None,
    weight: float,
) -> Distillation:
    """Make the step for weight * L_Disc and the terms of `objective`, on one pass over
    the corrupted text."""
    terms = [
        Term("electra.replaced_tokens", weight),
        *(objective.terms if objective else ()),
    ]
    shown = Shape.from_config(teacher.config) if teacher is not None else None
    return Distillation(
        discriminator,
        teacher,
        Objective(terms, Shape.from_config(discriminator.config), shown),
    )


def labelled(batch: Mapping[str, Any]) -> Tensor:
    """Mark where the generator predicts, (B, L). Raises ObjectiveError when the batch
    was not corrupted."""
    if "labels" not in batch:
        raise ObjectiveError(
            "replaced token detection needs masked text: give the stage `corrupt: "
            "electra.mask`"
        )
    chosen_BL: Tensor = batch["labels"] != IGNORE_INDEX
    return chosen_BL


def losses(
    discriminate: Distillation,
    batch: Mapping[str, Any],
    logits_RV: Tensor,
    temperature: float,
) -> TensorDict:
    """Add L_MLM of the generator's logits at the labelled positions to the loss of
    `discriminate` on its samples.

    The samples carry no gradient: the generator is trained to be right, not to fool the
    discriminator (Sec. 2).
    """
    labels_BL = batch["labels"]
    items = batch.get("items")
    labels_R = labels_BL[labels_BL != IGNORE_INDEX]
    generator = masked_lm(logits_RV, labels_R, None)
    if items is not None:
        generator = weigh_part(generator, len(labels_R), items["label"])
    ids_BL, replaced_BL = replace(batch["input_ids"], labels_BL, logits_RV, temperature)
    parts = discriminate(**{**batch, "input_ids": ids_BL, "labels": replaced_BL})
    return parts | {"loss": parts["loss"] + generator, "generator": generator.detach()}


class ReplacedTokens(WrappedStep):
    """step(**batch) -> L_MLM + weight * L_Disc (+ the terms of `objective`), of a batch
    that `mask` has corrupted.

    The student is the discriminator. The generator is an ELECTRA of `width` times its
    hidden size and `layers` times its depth, with FFN 4 times and heads of 64 as in the
    authors' code; it is trained and saved with the step, and discarded at its end. Both
    share word, position and type embeddings (Sec. 3.2). width: small 1/4 (Table 6; the
    released small model used 1), base 1/3, large 1/4. Raises StudentError if the
    student is not an ELECTRA discriminator.
    """

    wraps = "discriminate"

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective | None,
        *,
        weight: float = 50.0,
        width: float = 0.25,
        layers: float = 1.0,
        temperature: Temperature = 1.0,
    ) -> None:
        super().__init__()
        reads_teacher = objective is not None and "logits" in objective.teacher_wants
        for role, model, needed in (
            ("student", student, True),
            ("teacher", teacher, reads_teacher),
        ):
            if needed and not isinstance(model, ElectraForPreTraining):
                raise StudentError(
                    f"electra.ReplacedTokens: the {role} must be an ELECTRA "
                    f"discriminator, not {type(model).__name__}: give the stage `head: "
                    f"pretraining` and a {role} of the family electra"
                )
        self.generator = _generator(student, width, layers)
        self.discriminate = detection(student, teacher, objective, weight)
        self.temperature = temperature

    def forward(self, **batch: Any) -> TensorDict:
        shown = read(
            self.generator, batch, frozenset({"logits"}), at_BL=labelled(batch)
        )
        assert shown.logits is not None
        return losses(self.discriminate, batch, shown.logits, self.temperature)


def _generator(student: Any, width: float, layers: float) -> ElectraForMaskedLM:
    config = copy.deepcopy(student.config)
    config._attn_implementation = None
    hidden = max(1, round(width * config.hidden_size))
    config.hidden_size = hidden
    config.intermediate_size = 4 * hidden
    config.num_attention_heads = max(
        h for h in range(1, max(1, hidden // 64) + 1) if hidden % h == 0
    )
    config.num_hidden_layers = max(1, round(layers * config.num_hidden_layers))
    generator = ElectraForMaskedLM(config)
    generator.electra.embeddings = student.electra.embeddings
    generator.generator_lm_head.weight = (
        student.electra.embeddings.word_embeddings.weight
    )
    return generator


class FineTuning(WrappedStep):
    """step(**batch) -> `objective`, each layer learning at `decay` times the rate of
    the one above it.

    decay: 0.8 for small and base, 0.9 for large (Appendix B).
    """

    wraps = "minimise"

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective,
        *,
        decay: float = 0.8,
    ) -> None:
        super().__init__()
        self.minimise = Distillation(student, teacher, objective)
        self.top = Shape.from_config(student.config).layers + 2
        self.decay = decay
        family = families.find(student.config.model_type)
        self.depths = {
            name: place.depth
            for name, _ in student.named_parameters()
            if (place := family.place(name)) is not None and place.depth is not None
        }
        if student.config.is_encoder_decoder or not any(self.depths.values()):
            raise ObjectiveError(
                "electra.FineTuning: a layer learns slower than the one above it, and "
                f"{student.config.model_type} has no single stack of layers with "
                "weights of their own: use a student of another family"
            )

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Group the parameters by depth, 0 for the embeddings."""
        names = {id(each): name for name, each in self.student.named_parameters()}
        grouped = dict[str, list[nn.Parameter]]()
        for parameter in self.parameters():
            if parameter.requires_grad:
                depth = self.depths.get(names.get(id(parameter), ""), self.top)
                grouped.setdefault(f"depth {depth}", []).append(parameter)
        return grouped

    def factors(self, step: int, total: int) -> dict[str, float]:
        return {
            name: self.decay ** (self.top - int(name.removeprefix("depth ")))
            for name in self.groups()
        }
