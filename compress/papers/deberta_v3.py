"""He, Gao & Chen 2023, "DeBERTaV3: Improving DeBERTa using ELECTRA-Style Pre-Training
with Gradient-Disentangled Embedding Sharing", arXiv:2111.09543.

Sec. 3.1  ReplacedTokenDetection  step: L_MLM + 50 L_RTD
Sec. 3.2  `sharing`       nes: no table shared; es: one for both models, as in ELECTRA
Sec. 3.3  Disentangled    gdes: E_D = sg(E_G) + E_Delta, with E_Delta = 0 at first
(code)    Detector        LayerNorm(h + h_[CLS]) -> dense -> activation -> 1

The formulas are ELECTRA's: electra.replace, electra.replaced_tokens. The corruption of
the authors' code is `{by: bert.mask, masked: 1.0, random: 0.0}`: exactly 15 % of the
tokens, all hidden.

Shapes: B examples, L tokens, R chosen positions, D hidden, E embedding, V vocabulary.

Deviations
- from the authors' code: one backward pass and one optimiser. Theirs takes a step of
  the generator and then, on the same batch, one of the discriminator. Adam is
  elementwise, and gradients are clipped separately here, so that under gdes and nes,
  where the losses share no parameter, the difference is only the table that the
  discriminator reads under gdes: theirs already includes the generator's step. Under es
  one step follows the sum of both gradients.
- from the authors' code: tokens are chosen anywhere in the row; theirs chooses one in
  each stretch of six.
- from the authors' code: rows are whole sentences of one document; theirs cut one text
  of all documents every 510 tokens.
- from the authors' code: `weight` is the paper's 50; their default is 10.
- theirs gives the discriminator a table of positions that it never reads if
  `position_biased_input` is false; transformers has none then. If it is true, positions
  are shared like words, and the generator predicts from its last layer instead of the
  enhanced mask decoder.
"""

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import DebertaV2ForMaskedLM, DebertaV2Model, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2PreTrainedModel
from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput

from compress.errors import StudentError
from compress.models.padding import first_token
from compress.models.signals import read
from compress.papers import electra
from compress.papers.deberta import MaskDecoder
from compress.training.objective import Objective
from compress.training.reads import Temperature
from compress.training.step import WrappedStep

SHARED_TABLES = ("word_embeddings", "position_embeddings")


class Detector(DebertaV2PreTrainedModel):
    """An encoder with a head that detects replaced tokens: (B, L) logits."""

    def __init__(self, encoder: DebertaV2Model) -> None:
        config: Any = encoder.config
        super().__init__(config)
        self.deberta = encoder
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.out = nn.Linear(config.hidden_size, 1)
        for layer in (self.dense, self.out):
            nn.init.normal_(layer.weight, std=config.initializer_range)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> ElectraForPreTrainingOutput:
        shown = self.deberta(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            output_hidden_states=output_hidden_states,
        )
        hidden_BLD = shown.last_hidden_state
        first_B1D = first_token(hidden_BLD, attention_mask)[:, None]
        hidden_BLD = self.activation(self.dense(self.norm(hidden_BLD + first_B1D)))
        return ElectraForPreTrainingOutput(
            logits=self.out(hidden_BLD)[..., 0], hidden_states=shown.hidden_states
        )


class Disentangled(nn.Module):
    """E_D = sg(E_G) + E_Delta: a table that follows the generator's, whose gradients
    reach only the difference.

    `table` returns rows of E_D. Its weight is a frozen copy of E_D, which is updated
    whenever its state is read, and by `settle`, which ends the sharing.
    """

    def __init__(self, table: nn.Embedding, generator: nn.Embedding) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros_like(generator.weight))
        # in a tuple: the two models register them already
        self._tables = (table, generator)
        table.weight.requires_grad_(False)
        self._hooks = (
            table.register_forward_hook(self._answer),
            table.register_state_dict_pre_hook(lambda *_: self._write()),
        )

    def settle(self) -> None:
        self._write()
        for hook in self._hooks:
            hook.remove()
        self._tables[0].weight.requires_grad_()

    def _answer(self, table: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> Tensor:
        generator = self._tables[1]
        return embedding(args[0], generator.weight.detach()) + embedding(
            args[0], self.delta, generator.padding_idx
        )

    @torch.no_grad()
    def _write(self) -> None:
        table, generator = self._tables
        table.weight.copy_(generator.weight + self.delta)


class ReplacedTokenDetection(WrappedStep):
    """step(**batch) -> L_MLM + weight * L_RTD (+ the terms of `objective`), of a batch
    that bert.mask has corrupted.

    The student is the encoder of the discriminator, whose head belongs to the step. The
    generator has the student's width and `layers` times its depth, starts from the
    student's tables, and is trained, saved and discarded with the step. `finish` writes
    the student's tables. Raises StudentError if the student is not a DeBERTa-v2.
    """

    wraps = "discriminate"

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective | None,
        *,
        weight: float = 50.0,
        layers: float = 0.5,
        temperature: Temperature = 1.0,
        sharing: Literal["gdes", "es", "nes"] = "gdes",
    ) -> None:
        super().__init__()
        if not isinstance(student, DebertaV2Model):
            raise StudentError(
                "deberta_v3.ReplacedTokenDetection trains an encoder of the family "
                f"deberta-v2, not {type(student).__name__}: give the stage `head: "
                "encoder` and the student `family: deberta-v2`"
            )
        config: Any = copy.deepcopy(student.config)
        config.num_hidden_layers = max(1, round(layers * config.num_hidden_layers))
        generator = DebertaV2ForMaskedLM(config)
        self.generator = (
            generator if config.position_biased_input else MaskDecoder(generator)
        )
        self._student = (student,)  # in a tuple: the detector registers it already
        self.discriminate = electra.detection(
            Detector(student), teacher, objective, weight
        )
        self.shared = nn.ModuleDict(_share_tables(student, generator, sharing))
        self.temperature = temperature

    @property
    def student(self) -> PreTrainedModel:
        return self._student[0]

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        chosen_BL = electra.labelled(batch)
        if isinstance(self.generator, MaskDecoder):
            logits_RV = self.generator(batch)
        else:
            logits_RV = read(
                self.generator, batch, frozenset({"logits"}), at_BL=chosen_BL
            ).logits
        return electra.losses(self.discriminate, batch, logits_RV, self.temperature)

    def clip_groups(self) -> list[list[nn.Parameter]]:
        """Return what each of the authors' two optimisers clips: the generator's
        parameters, and all others."""
        generator = list(self.generator.parameters())
        known = {id(each) for each in generator}
        return [
            generator,
            [each for each in self.parameters() if id(each) not in known],
        ]

    def finish(self) -> None:
        for each in self.shared.children():
            each.settle()  # type: ignore[operator]


def _share_tables(
    student: DebertaV2Model, generator: DebertaV2ForMaskedLM, sharing: str
) -> dict[str, Disentangled]:
    """Make the generator and the student share their tables; return the modules of gdes
    by table."""
    of_student: Any = student.embeddings
    of_generator: Any = generator.deberta.embeddings
    shared = dict[str, Disentangled]()
    for name in SHARED_TABLES:
        table = getattr(of_student, name)
        if table is None:
            continue
        if sharing == "es":
            setattr(of_generator, name, table)
        else:
            getattr(of_generator, name).load_state_dict(table.state_dict())
        if sharing == "gdes":
            shared[name] = Disentangled(table, getattr(of_generator, name))
    if hasattr(generator, "cls"):
        generator.cls.predictions.decoder.weight = of_generator.word_embeddings.weight
    return shared
