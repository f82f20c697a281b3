"""Define IB-BERT, the inverted-bottleneck BERT-large that teaches MobileBERT (Sun et
al. 2020, arXiv:2004.02984).

Every block (Table 1) widens the 512-wide stream to 1,024, works there like a block of
BERT-large, and returns to 512, so that all feature maps are as wide as MobileBERT's.
transformers' MobileBERT has this structure with one difference: its queries and keys
read the widened stream, IB-BERT's read the stream itself, like its values. Embeddings,
pooler and the pre-training heads are transformers' own, with MobileBERT's parameter
names, so they can be copied to a student.

Shapes: B batch, L tokens, D stream (512), I intra-block (1,024), H heads, K head size
(I / H).

Deviation from transformers' MobileBERT, whose defaults apply otherwise: every LayerNorm
has the same epsilon, 1e-12 as in BERT; theirs ignores `layer_norm_eps` in the
embeddings and after the feed-forward network.
"""

from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mobilebert.modeling_mobilebert import (
    MobileBertEmbeddings,
    MobileBertEncoder,
    MobileBertForMaskedLM,
    MobileBertForPreTraining,
    MobileBertForQuestionAnswering,
    MobileBertForSequenceClassification,
    MobileBertForTokenClassification,
    MobileBertModel,
    MobileBertOnlyMLMHead,
    MobileBertPooler,
    MobileBertPreTrainedModel,
    MobileBertPreTrainingHeads,
    eager_attention_forward,
)


class IBBertConfig(PreTrainedConfig):
    """Sizes and names as in transformers' MobileBertConfig; the defaults are the
    paper's teacher, 293M parameters.

    hidden_act is the tanh form of GELU, as in the authors' code.
    """

    model_type = "ib-bert"

    vocab_size: int = 30522
    embedding_size: int = 128
    trigram_input: bool = True
    hidden_size: int = 512
    intra_bottleneck_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 4
    hidden_act: str = "gelu_pytorch_tanh"
    normalization_type: str = "layer_norm"
    layer_norm_eps: float = 1e-12
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    classifier_activation: bool = True
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True

    @property
    def true_hidden_size(self) -> int:
        """Return the width of attention and feed-forward network, under transformers'
        name."""
        return self.intra_bottleneck_size


class IBBertAttention(nn.Module):
    """Attend with queries, keys and values of the D-wide stream, projected to width I;
    add the result to the widened stream."""

    def __init__(self, config: IBBertConfig) -> None:
        super().__init__()
        D = config.hidden_size
        inner = config.intra_bottleneck_size
        if inner % config.num_attention_heads:
            raise ValueError(
                f"intra_bottleneck_size {inner} is not a multiple of "
                f"num_attention_heads {config.num_attention_heads}"
            )
        self.config = config
        self.head_size = inner // config.num_attention_heads
        self.is_causal = False
        self.query = nn.Linear(D, inner)
        self.key = nn.Linear(D, inner)
        self.value = nn.Linear(D, inner)
        self.dense = nn.Linear(inner, inner)
        self.LayerNorm = nn.LayerNorm(inner, eps=config.layer_norm_eps)

    def forward(
        self,
        stream_BLD: Tensor,
        widened_BLI: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (B, L, I) after the residual and its norm, and the attention
        probabilities if they are computed."""
        split = (*stream_BLD.shape[:-1], -1, self.head_size)
        query_BHLK = self.query(stream_BLD).view(split).transpose(1, 2)
        key_BHLK = self.key(stream_BLD).view(split).transpose(1, 2)
        value_BHLK = self.value(stream_BLD).view(split).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        read_BLHK, probabilities = attend(
            self,
            query_BHLK,
            key_BHLK,
            value_BHLK,
            attention_mask,
            dropout=self.config.attention_probs_dropout_prob if self.training else 0.0,
            scaling=self.head_size**-0.5,
            **kwargs,
        )
        read_BLI = read_BLHK.reshape(widened_BLI.shape)
        return self.LayerNorm(self.dense(read_BLI) + widened_BLI), probabilities


class IBBertLayer(GradientCheckpointingLayer):
    """Widen, attend, feed forward, narrow: each with a residual, and a residual of the
    stream around all of them."""

    def __init__(self, config: IBBertConfig) -> None:
        super().__init__()
        D = config.hidden_size
        inner = config.intra_bottleneck_size
        eps = config.layer_norm_eps
        self.widen = nn.Linear(D, inner)
        self.widen_norm = nn.LayerNorm(inner, eps=eps)
        self.attention = IBBertAttention(config)
        self.ffn_in = nn.Linear(inner, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.ffn_out = nn.Linear(config.intermediate_size, inner)
        self.ffn_norm = nn.LayerNorm(inner, eps=eps)
        self.narrow = nn.Linear(inner, D)
        self.narrow_norm = nn.LayerNorm(D, eps=eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, stream_BLD: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        widened_BLI = self.widen_norm(self.widen(stream_BLD))
        attended_BLI, _ = self.attention(
            stream_BLD, widened_BLI, attention_mask, **kwargs
        )
        fed_BLI = self.ffn_norm(
            self.ffn_out(self.activation(self.ffn_in(attended_BLI))) + attended_BLI
        )
        out: Tensor = self.narrow_norm(self.dropout(self.narrow(fed_BLI)) + stream_BLD)
        return out


class IBBertPreTrainedModel(MobileBertPreTrainedModel):
    config: IBBertConfig  # type: ignore[assignment]
    config_class = IBBertConfig
    base_model_prefix = "ib_bert"
    _input_embed_layer = "word_embeddings"
    _can_record_outputs = {"hidden_states": IBBertLayer, "attentions": IBBertAttention}  # noqa: RUF012


class IBBertEncoder(nn.Module):
    def __init__(self, config: IBBertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            IBBertLayer(config) for _ in range(config.num_hidden_layers)
        )

    forward = MobileBertEncoder.forward


class IBBertModel(IBBertPreTrainedModel):
    """Trigram embeddings, N blocks, and the pooler: tanh of a linear map of [CLS], or
    with `classifier_activation: false` [CLS] itself."""

    def __init__(self, config: IBBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = MobileBertEmbeddings(config)
        self.embeddings.LayerNorm = nn.LayerNorm(
            config.hidden_size, eps=config.layer_norm_eps
        )
        self.encoder = IBBertEncoder(config)
        self.pooler = MobileBertPooler(config) if add_pooling_layer else None
        self.post_init()

    forward = MobileBertModel.forward


class _WithHead(IBBertPreTrainedModel):
    """An IB-BERT under a head of transformers' MobileBERT, whose `forward` calls the
    encoder `self.mobilebert`."""

    pooled = True

    def __init__(self, config: IBBertConfig) -> None:
        super().__init__(config)
        self.num_labels = len(config.id2label or {})
        self.ib_bert = IBBertModel(config, add_pooling_layer=self.pooled)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: IBBertConfig) -> None:
        """Add dropout and a linear classifier, under MobileBERT's names."""
        rate = config.classifier_dropout
        self.dropout = nn.Dropout(config.hidden_dropout_prob if rate is None else rate)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)

    @property
    def mobilebert(self) -> IBBertModel:
        return self.ib_bert


class _WithLanguageModel(_WithHead):
    """A head whose output matrix has two parts, one of which is tied to the
    embedding."""

    head_class: type[nn.Module]
    _tied_weights_keys = {  # noqa: RUF012  transformers' own form
        "cls.predictions.decoder.bias": "cls.predictions.bias",
        "cls.predictions.decoder.weight": "ib_bert.embeddings.word_embeddings.weight",
    }
    get_output_embeddings = MobileBertForMaskedLM.get_output_embeddings
    set_output_embeddings = MobileBertForMaskedLM.set_output_embeddings

    def add_head(self, config: IBBertConfig) -> None:
        self.cls = self.head_class(config)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Embedding:
        """Resize both parts; the second is stored transposed, which the library does
        not expect."""
        predictions: Any = self.cls.predictions
        predictions.dense = self._get_resized_lm_head(
            predictions.dense, new_num_tokens=new_num_tokens, transposed=True
        )
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)


class IBBertForPreTraining(_WithLanguageModel):
    """Return prediction_logits (B, L, V) and seq_relationship_logits (B, 2); the loss
    is a sum, given both labels."""

    head_class = MobileBertPreTrainingHeads
    forward = MobileBertForPreTraining.forward


class IBBertForMaskedLM(_WithLanguageModel):
    pooled = False
    head_class = MobileBertOnlyMLMHead
    forward = MobileBertForMaskedLM.forward


class IBBertForSequenceClassification(_WithHead):
    forward = MobileBertForSequenceClassification.forward


class IBBertForTokenClassification(_WithHead):
    pooled = False
    forward = MobileBertForTokenClassification.forward


class IBBertForQuestionAnswering(_WithHead):
    pooled = False
    forward = MobileBertForQuestionAnswering.forward

    def add_head(self, config: IBBertConfig) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, 2)


AutoConfig.register("ib-bert", IBBertConfig)
AutoModel.register(IBBertConfig, IBBertModel)
AutoModelForPreTraining.register(IBBertConfig, IBBertForPreTraining)
AutoModelForMaskedLM.register(IBBertConfig, IBBertForMaskedLM)
AutoModelForSequenceClassification.register(
    IBBertConfig, IBBertForSequenceClassification
)
AutoModelForTokenClassification.register(IBBertConfig, IBBertForTokenClassification)
AutoModelForQuestionAnswering.register(IBBertConfig, IBBertForQuestionAnswering)
