"""ModernBERT: rotary positions, gated neurons, local and global layers."""

from compress.families.family import Family

MODERNBERT_LAYER = r"(?:.*\.)?layers\.(?P<layer>\d+)"

FAMILY = Family(
    "modernbert",
    rules={
        r"(?:.*\.)?embeddings\.tok_embeddings": "words: vocabulary hidden",
        r"(?:.*\.)?embeddings\.norm": "embedding_norm: hidden",
        rf"{MODERNBERT_LAYER}\.attn_norm": "attention_norm: hidden",  # the first layer has none
        rf"{MODERNBERT_LAYER}\.attn\.Wqkv": "qkv: query+query+value hidden",
        rf"{MODERNBERT_LAYER}\.attn\.Wo": "attention_out: hidden value",
        rf"{MODERNBERT_LAYER}\.mlp_norm": "ffn_norm: hidden",
        # what is activated, then its gates
        rf"{MODERNBERT_LAYER}\.mlp\.Wi": "ffn_in: ffn+ffn hidden",
        rf"{MODERNBERT_LAYER}\.mlp\.Wo": "ffn_out: hidden ffn",
        r"(?:.*\.)?final_norm": "final_norm: hidden",
        # the same before a classifier and before the table
        r"head\.dense": "lm: hidden hidden",
        r"head\.norm": "lm_norm: hidden",
        r"classifier": "classifier: . hidden",
        r"decoder": "lm_out: vocabulary hidden",
    },
    own_first_layer=True,
    rotary=True,
    kin="modernbert",
    gates=True,
    prepared_mask=True,
    counted=True,
    gated_neurons=True,
    always_pools=True,
)
