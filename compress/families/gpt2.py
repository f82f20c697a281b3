"""GPT-2, whose linear layers are convolutions: their matrices have the inputs first."""

from compress.families.family import Family

GPT2_BLOCK = r"(?:.*\.)?h\.(?P<layer>\d+)"

FAMILY = Family(
    "gpt2",
    rules={
        r"(?:.*\.)?wte|lm_head": "words: vocabulary hidden",
        r"(?:.*\.)?wpe": "positions: . hidden",
        rf"{GPT2_BLOCK}\.ln_1": "attention_norm: hidden",
        rf"{GPT2_BLOCK}\.attn\.c_attn": "qkv: hidden query+query+value",
        rf"{GPT2_BLOCK}\.attn\.c_proj": "attention_out: value hidden",
        rf"{GPT2_BLOCK}\.ln_2": "ffn_norm: hidden",
        rf"{GPT2_BLOCK}\.mlp\.c_fc": "ffn_in: hidden ffn",
        rf"{GPT2_BLOCK}\.mlp\.c_proj": "ffn_out: ffn hidden",
        r"(?:.*\.)?ln_f": "final_norm: hidden",
        r"score|classifier|qa_outputs": "classifier: . hidden",
    },
    inputs_first=True,
    kin="gpt2",
    copied_by_name=True,
    prepared_mask=True,
    looks_back=True,
    segments_uncounted=True,
    generates="decoder",
)
