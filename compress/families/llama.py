"""Llama: rotary positions, keys and values shared by groups of heads, gated neurons,
RMS norms."""

from compress.families.family import Family

LLAMA_LAYER = r"(?:.*\.)?layers\.(?P<layer>\d+)"

FAMILY = Family(
    "llama",
    rules={
        r"(?:.*\.)?embed_tokens|lm_head": "words: vocabulary hidden",
        rf"{LLAMA_LAYER}\.input_layernorm": "attention_norm: hidden",
        rf"{LLAMA_LAYER}\.self_attn\.q_proj": "query: heads hidden",
        rf"{LLAMA_LAYER}\.self_attn\.k_proj": "key: heads hidden",
        rf"{LLAMA_LAYER}\.self_attn\.v_proj": "value: heads hidden",
        rf"{LLAMA_LAYER}\.self_attn\.[qk]_norm": "head_gain: .",  # Qwen3: one for all heads
        rf"{LLAMA_LAYER}\.self_attn\.o_proj": "attention_out: hidden heads",
        rf"{LLAMA_LAYER}\.post_attention_layernorm": "ffn_norm: hidden",
        rf"{LLAMA_LAYER}\.mlp\.(?:gate|up)_proj": "ffn_in: ffn hidden",
        rf"{LLAMA_LAYER}\.mlp\.down_proj": "ffn_out: hidden ffn",
        r"(?:.*\.)?norm": "final_norm: hidden",
        r"score|classifier|qa_outputs": "classifier: . hidden",
    },
    own_width=True,
    grouped=True,
    kin="llama",
    copied_by_name=True,
    prepared_mask=True,
    looks_back=True,
    generates="decoder",
    gated_neurons=True,
)
