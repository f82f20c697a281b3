"""Define a student without layers: the mean of its tokens' vectors, and a linear head.

It ignores order and context; `model2vec` computes the vectors from a teacher, and a
forward pass reads a few rows of a table. It uses the teacher's tokenizer, and is
exported and shipped like any other model.

Shapes: B batch, L tokens, D width, V classes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    SequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple


class StaticConfig(PreTrainedConfig):
    """The settings of a static model. hidden_size: width of the vectors; normalize:
    divide their mean by its length."""

    model_type = "static-embedding"

    vocab_size: int = 30522
    hidden_size: int = 256
    normalize: bool = False
    classifier_dropout: float = 0.0
    initializer_range: float = 0.02
    pad_token_id: int | None = 0


class StaticPreTrainedModel(PreTrainedModel):
    config: StaticConfig
    config_class = StaticConfig
    base_model_prefix = "static"
    _input_embed_layer = "word_embeddings"


class StaticModel(StaticPreTrainedModel):
    """Look up the tokens' vectors.

    last_hidden_state: (B, L, D) the vectors; pooler_output: (B, D) their mean over real
    tokens, 0 without any.
    """

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(
            config.vocab_size, config.hidden_size, config.pad_token_id
        )
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        vectors_BLD: Tensor = (
            self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        )
        if attention_mask is None:
            attention_mask = torch.ones_like(vectors_BLD[..., 0])
        mask_BL1 = attention_mask.unsqueeze(-1).to(vectors_BLD.dtype)
        mean_BD = (vectors_BLD * mask_BL1).sum(1) / mask_BL1.sum(1).clamp(min=1)
        if self.config.normalize:
            mean_BD = mean_BD / mean_BD.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        shown = (vectors_BLD,) if output_hidden_states else None
        return BaseModelOutputWithPooling(vectors_BLD, mean_BD, shown)


class StaticForSequenceClassification(StaticPreTrainedModel):
    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.static = StaticModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, len(config.id2label or {}))
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        out = self.static(input_ids, attention_mask, inputs_embeds, **kwargs)
        logits_BV = self.classifier(self.dropout(out.pooler_output))
        loss = (
            None
            if labels is None
            else self.loss_function(labels, logits_BV, self.config)
        )
        return SequenceClassifierOutput(loss, logits_BV, out.hidden_states)


AutoConfig.register("static-embedding", StaticConfig)
AutoModel.register(StaticConfig, StaticModel)
AutoModelForSequenceClassification.register(
    StaticConfig, StaticForSequenceClassification
)
