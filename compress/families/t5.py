"""T5: its encoder, and the full model as a language model."""

from compress.families.family import Family

T5_BLOCK = r"(?:.*\.)?block\.(?P<layer>\d+)\.layer"

FAMILY = Family(
    "t5",
    rules={
        r"(?:.*\.)?(?:shared|encoder\.embed_tokens)": "words: vocabulary hidden",
        r"(?:.*\.)?block\.0\.layer\.0\.SelfAttention\.relative_attention_bias": "relative: . heads",
        rf"{T5_BLOCK}\.0\.SelfAttention\.q": "query: query hidden",
        rf"{T5_BLOCK}\.0\.SelfAttention\.k": "key: query hidden",
        rf"{T5_BLOCK}\.0\.SelfAttention\.v": "value: value hidden",
        rf"{T5_BLOCK}\.0\.SelfAttention\.o": "attention_out: hidden value",
        rf"{T5_BLOCK}\.0\.layer_norm": "attention_norm: hidden",
        rf"{T5_BLOCK}\.1\.DenseReluDense\.wi(?:_0|_1)?": "ffn_in: ffn hidden",
        rf"{T5_BLOCK}\.1\.DenseReluDense\.wo": "ffn_out: hidden ffn",
        rf"{T5_BLOCK}\.1\.layer_norm": "ffn_norm: hidden",
        r"(?:.*\.)?encoder\.final_layer_norm": "final_norm: hidden",
        r"classifier": "classifier: . hidden",
    },
    own_width=True,
    shared_heads=True,
    prepared_mask=True,
    generates="encoder-decoder",
)
