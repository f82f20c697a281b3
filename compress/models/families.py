"""Model families of ours. Importing this module makes the Auto classes of transformers know them."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from compress.models.ibbert import (
    IBBertConfig,
    IBBertForMaskedLM,
    IBBertForPreTraining,
    IBBertForQuestionAnswering,
    IBBertForSequenceClassification,
    IBBertForTokenClassification,
    IBBertModel,
)
from compress.models.static import StaticConfig, StaticForSequenceClassification, StaticModel
from compress.models.uneven import register as _register_uneven

__all__ = [
    "IBBertConfig",
    "IBBertForMaskedLM",
    "IBBertForPreTraining",
    "IBBertForQuestionAnswering",
    "IBBertForSequenceClassification",
    "IBBertForTokenClassification",
    "IBBertModel",
    "StaticConfig",
    "StaticForSequenceClassification",
    "StaticModel",
]

AutoConfig.register("ib-bert", IBBertConfig)
AutoModel.register(IBBertConfig, IBBertModel)
AutoModelForPreTraining.register(IBBertConfig, IBBertForPreTraining)
AutoModelForMaskedLM.register(IBBertConfig, IBBertForMaskedLM)
AutoModelForSequenceClassification.register(IBBertConfig, IBBertForSequenceClassification)
AutoModelForTokenClassification.register(IBBertConfig, IBBertForTokenClassification)
AutoModelForQuestionAnswering.register(IBBertConfig, IBBertForQuestionAnswering)
AutoConfig.register("static-embedding", StaticConfig)
AutoModel.register(StaticConfig, StaticModel)
AutoModelForSequenceClassification.register(StaticConfig, StaticForSequenceClassification)
_register_uneven()
