"""MobileBERT: layers that narrow the stream, with several feed-forward networks
each."""

from dataclasses import dataclass, replace
from typing import Any

from compress.families.bert import ATTENTION_NAME, BERT_LAYER
from compress.families.family import Family, LayerWork

NETWORK = r"(?:.*\.)?layer\.(?P<block>(?P<layer>\d+)(?:\.ffn\.\d+)?)"


@dataclass(frozen=True)
class Trigrams(Family):
    """A family that may embed each token with its neighbours."""

    def embedding_work(self, config: Any, shape: Any) -> int:
        width: int = shape.embedding * (3 if config.trigram_input else 1)
        return (
            width * shape.hidden if config.trigram_input or width != shape.hidden else 0
        )


@dataclass(frozen=True)
class MobileBERT(Trigrams):
    """A family whose layers narrow the stream to `true_hidden_size` features."""

    def layer_work(self, config: Any, shape: Any) -> LayerWork:
        stream = shape.hidden
        inner = config.true_hidden_size
        ffn = shape.ffn
        networks = config.num_feedforward_networks
        bottleneck = config.use_bottleneck
        narrowed = stream * inner if bottleneck else 0
        shared = bottleneck and config.use_bottleneck_attention
        values = inner if shared or not bottleneck else stream
        return replace(
            super().layer_work(config, shape),
            context=narrowed + inner * inner + values * inner,
            answer=2 * inner * inner + narrowed + (0 if shared else narrowed),
            feed_forward=2 * networks * inner * ffn,
            activated=networks * ffn,
            normed=(1 + networks) * inner
            + (stream + (1 if shared else 2) * inner if bottleneck else 0),
            mask=inner,
        )


FAMILY = MobileBERT(
    "mobilebert",
    rules={
        r"(?:.*\.)?embeddings\.word_embeddings": "words: vocabulary embedding",
        r"(?:.*\.)?embeddings\.embedding_transformation": "embedding_up: hidden embedding+embedding+embedding",
        r"(?:.*\.)?embeddings\.position_embeddings": "positions: . hidden",
        r"(?:.*\.)?embeddings\.token_type_embeddings": "types: . hidden",
        r"(?:.*\.)?embeddings\.LayerNorm": "embedding_norm: hidden",
        rf"{BERT_LAYER}\.bottleneck\.input\.dense": "narrow: bottleneck hidden",
        rf"{BERT_LAYER}\.bottleneck\.input\.LayerNorm": "narrow_norm: bottleneck",
        rf"{BERT_LAYER}\.bottleneck\.attention\.dense": "narrow_attention: shared hidden",
        rf"{BERT_LAYER}\.bottleneck\.attention\.LayerNorm": "narrow_attention_norm: shared",
        rf"{ATTENTION_NAME}\.self\.query": "query: query shared",
        rf"{ATTENTION_NAME}\.self\.key": "key: query shared",
        rf"{ATTENTION_NAME}\.self\.value": "value: value hidden",
        rf"{ATTENTION_NAME}\.output\.dense": "attention_out: bottleneck value",
        rf"{ATTENTION_NAME}\.output\.LayerNorm": "attention_norm: bottleneck",
        rf"{NETWORK}\.intermediate\.dense": "ffn_in: ffn bottleneck",
        rf"{NETWORK}\.output\.dense": "ffn_out: bottleneck ffn",
        rf"{NETWORK}\.output\.LayerNorm": "ffn_norm: bottleneck",
        rf"{BERT_LAYER}\.output\.bottleneck\.dense": "widen: hidden bottleneck",
        rf"{BERT_LAYER}\.output\.bottleneck\.LayerNorm": "widen_norm: hidden",
        r"(?:.*\.)?pooler\.dense": "pooler: hidden hidden",
        r"classifier|qa_outputs": "classifier: . hidden",
    },
    factorised=True,
    bottleneck=True,
    shortest_text=3,  # of two tokens torch traces the trigrams differently
    prepared_mask=True,
    counted=True,
)
