"""IB-BERT with a head: pre-training, masked language model, classification, tagging, question answering.

Outputs are named as those of transformers' BERT; losses are the library's own. Output matrix of the language model:
[word embeddings (V, E) | an extra (V, D - E)], the first tied to the input, as MobileBERT's.
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import (
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.mobilebert.modeling_mobilebert import (
    MobileBertForPreTrainingOutput,
    MobileBertOnlyMLMHead,
    MobileBertPreTrainingHeads,
)
from transformers.utils.generic import can_return_tuple

from compress.models.ibbert import IBBertConfig, IBBertModel, IBBertPreTrainedModel

_TIED = {
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "cls.predictions.decoder.weight": "ib_bert.embeddings.word_embeddings.weight",
}


class _WithLanguageModel(IBBertPreTrainedModel):
    """The output matrix in two parts, and what transformers asks of a model that has one."""

    cls: MobileBertOnlyMLMHead | MobileBertPreTrainingHeads
    _tied_weights_keys = _TIED

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """The extra part is stored transposed, which the library does not know."""
        self.cls.predictions.dense = self._get_resized_lm_head(
            self.cls.predictions.dense, new_num_tokens=new_num_tokens, transposed=True
        )
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)


class IBBertForPreTraining(_WithLanguageModel):
    """prediction_logits (B, L, V) and seq_relationship_logits (B, 2); the loss is their sum, where both have labels."""

    def __init__(self, config: IBBertConfig) -> None:
        super().__init__(config)
        self.ib_bert = IBBertModel(config)
        self.cls = MobileBertPreTrainingHeads(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        **kwargs: Any,
    ) -> MobileBertForPreTrainingOutput:
        out = self.ib_bert(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        words_BLV, pair_B2 = self.cls(out.last_hidden_state, out.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = nn.functional.cross_entropy(words_BLV.flatten(0, 1), labels.flatten())
            loss = loss + nn.functional.cross_entropy(pair_B2, next_sentence_label)
        return MobileBertForPreTrainingOutput(
            loss=loss,
            prediction_logits=words_BLV,
            seq_relationship_logits=pair_B2,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )


class IBBertForMaskedLM(_WithLanguageModel):
    def __init__(self, config: IBBertConfig) -> None:
        super().__init__(config)
        self.ib_bert = IBBertModel(config, add_pooling_layer=False)
        self.cls = MobileBertOnlyMLMHead(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        out = self.ib_bert(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        logits_BLV = self.cls(out.last_hidden_state)
        loss = None if labels is None else self.loss_function(logits_BLV, labels, self.config.vocab_size)
        return MaskedLMOutput(loss, logits_BLV, out.hidden_states, out.attentions)


def _classifier(config: IBBertConfig) -> tuple[nn.Dropout, nn.Linear]:
    rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return nn.Dropout(rate), nn.Linear(config.hidden_size, len(config.id2label or {}))


class IBBertForSequenceClassification(IBBertPreTrainedModel):
    def __init__(self, config: IBBertConfig) -> None:
        super().__init__(config)
        self.ib_bert = IBBertModel(config)
        self.dropout, self.classifier = _classifier(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        out = self.ib_bert(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        logits_BV = self.classifier(self.dropout(out.pooler_output))
        loss = None if labels is None else self.loss_function(labels, logits_BV, self.config)
        return SequenceClassifierOutput(loss, logits_BV, out.hidden_states, out.attentions)


class IBBertForTokenClassification(IBBertPreTrainedModel):
    def __init__(self, config: IBBertConfig) -> None:
        super().__init__(config)
        self.ib_bert = IBBertModel(config, add_pooling_layer=False)
        self.dropout, self.classifier = _classifier(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        out = self.ib_bert(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        logits_BLV = self.classifier(self.dropout(out.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits_BLV, labels, self.config)
        return TokenClassifierOutput(loss, logits_BLV, out.hidden_states, out.attentions)


class IBBertForQuestionAnswering(IBBertPreTrainedModel):
    def __init__(self, config: IBBertConfig) -> None:
        super().__init__(config)
        self.ib_bert = IBBertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        out = self.ib_bert(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        start_BL, end_BL = self.qa_outputs(out.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_BL, end_BL, start_positions, end_positions)
        return QuestionAnsweringModelOutput(loss, start_BL, end_BL, out.hidden_states, out.attentions)
