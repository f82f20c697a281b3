"""ALBERT: a factorised embedding, and layers that share weights in groups."""

from compress.families import bert
from compress.families.family import Family

GROUP = r"(?:.*\.)?albert_layer_groups\.(?P<block>\d+\.albert_layers\.\d+)"

FAMILY = Family(
    "albert",
    rules={
        **{
            pattern: rule
            for pattern, rule in bert.FAMILY.rules.items()
            if rule.startswith(
                ("words", "positions", "types", "embedding_norm", "classifier")
            )
        },
        r"(?:.*\.)?encoder\.embedding_hidden_mapping_in": "embedding_up: hidden embedding",
        rf"{GROUP}\.attention\.query": "query: query hidden",
        rf"{GROUP}\.attention\.key": "key: query hidden",
        rf"{GROUP}\.attention\.value": "value: value hidden",
        rf"{GROUP}\.attention\.dense": "attention_out: hidden value",
        rf"{GROUP}\.attention\.LayerNorm": "attention_norm: hidden",
        rf"{GROUP}\.ffn": "ffn_in: ffn hidden",
        rf"{GROUP}\.ffn_output": "ffn_out: hidden ffn",
        rf"{GROUP}\.full_layer_layer_norm": "ffn_norm: hidden",
        r"(?:.*\.)?pooler": "pooler: hidden hidden",
        r"sop_classifier\.classifier": "pair: . hidden",
        r"predictions\.dense": "lm: embedding hidden",
        r"predictions\.LayerNorm": "lm_norm: embedding",
        r"predictions\.decoder": "lm_out: vocabulary embedding",
        r"predictions": "lm_bias: vocabulary",
    },
    factorised=True,
    pair_labels=True,
    sharing="albert models share by config: {num_hidden_groups: G}",
    prepared_mask=True,
    counted=True,
    masked_by_feature=True,
)
