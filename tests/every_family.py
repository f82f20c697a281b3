"""A tiny config of every family of transformers that reads texts: the one table of what each family needs for it."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.models.auto import modeling_auto

VOCABULARY = 64
POSITIONS = 160
WINDOW = 8

CLASSIFIERS = tuple(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
"""Every family with a sequence classifier: encoders, decoders, and encoders with decoders."""

OTHER_ENCODERS = (
    *("afmoe", "apertus", "aria_text", "beam", "bert-generation", "bitnet", "clip_text_model", "cohere", "cohere2"),
    *("cohere2_moe", "cpmant", "cwm", "deepseek_v4", "ernie4_5", "ernie4_5_moe", "exaone_moe", "falcon_h1"),
    *(
        "falcon_mamba",
        "flex_olmo",
        "flint",
        "gemma4_text",
        "git",
        "glm4_moe",
        "gpt_neox_japanese",
        "granite",
        "granite_swa",
    ),
    *("granitemoe", "granitemoe_swa", "granitemoeshared", "hrm_text", "hy_v3", "hy_v4", "hyperclovax"),
    *("inkling2_text", "inkling_text", "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "llama4_text"),
    *(
        "mamba",
        "mellum",
        "mimo_v2_flash",
        "neomme",
        "minimax_m2",
        "minimax_m3_vl_text",
        "molmo2_text",
        "nanochat",
        "nemotron_h",
    ),
    *("olmo_hybrid", "olmoe", "openai_privacy_filter", "rwkv", "sam3_lite_text_text_model", "solar_open", "splinter"),
    *("tipsv2_text_model", "vaultgemma", "visual_bert", "xglm"),
)
"""Families without a sequence classifier whose plain model reads texts."""

UNBUILT: Mapping[str, str] = MappingProxyType({"layoutlmv2": "needs detectron2, which is no package of the index"})
"""Families that cannot be built here, and why."""

REFUSED = frozenset(
    {
        # operators that ONNX does not have
        *("apertus", "cpmant", "deepseek_v2", "diffllama", "fnet", "llama4_text", "olmo_hybrid", "qwen3_5"),
        *("qwen3_5_text", "qwen3_next", "tapas"),
        # graphs that the tracer or onnxruntime cannot make sense of
        *("axk2", "cohere", "cohere2", "cohere2_moe", "deepseek_v4", "ernie4_5", "ernie4_5_moe", "falcon_h1", "glm"),
        *("glm4", "helium", "hy_v4", "nemotron_h", "reformer", "t5gemma2", "zamba2"),
        # graphs that hold for one length only: blocks, recurrences and pooled positions, unrolled by the tracer
        *("afmoe", "canine", "falcon_mamba", "funnel", "jamba", "jetmoe", "longformer", "mamba", "minimax", "rwkv"),
        "zamba",
        # attention that needs CUDA
        "mra",
    }
)
"""Families of which no file is written."""
REFUSED_HEADLESS = frozenset({"perceiver"})
"""Families of which no file without a head is written: Perceiver's plain model reads `inputs`, no `input_ids`."""

SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        **dict.fromkeys(("max_position_embeddings", "n_positions"), POSITIONS),
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "word_embed_proj_dim"), 32),
        "embedding_size": 16,
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
        **dict.fromkeys(("head_dim", "d_kv", "d_head", "v_head_dim", "qk_nope_head_dim"), 8),
        **dict.fromkeys(("intermediate_size", "d_ff", "d_inner", "ffn_dim", "dff", "hidden_dim", "n_inner"), 48),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 48),
        **dict.fromkeys(("initializer_range", "init_std", "embed_init_std"), 0.2),
        **dict.fromkeys(("pad_token_id", "pad_index"), 0),
        "unk_index": 1,
        **dict.fromkeys(("bos_token_id", "cls_token_id", "bos_index", "decoder_start_token_id"), 2),
        **dict.fromkeys(("eos_token_id", "sep_token_id", "eos_index"), 3),
        **dict.fromkeys(("mask_token_id", "mask_index"), 4),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
        **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
        **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
        **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4},
        **{"sliding_window": WINDOW, "local_attention": WINDOW, "max_window_layers": 1},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    }
)
"""The value of a setting in every family that has it."""

SEEING: Mapping[str, Any] = MappingProxyType(
    {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "depth": 1},
        **{"num_heads": 4, "image_size": 32, "patch_size": 16, "out_hidden_size": 32, "num_position_embeddings": 16},
        "spatial_merge_size": 2,
    }
)
"""The sizes of the part that reads images, which no text reaches."""

LATENT = {"num_key_value_heads": 4, "head_dim": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"]}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
SHARED = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4}

OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "axk1": LATENT,
        "axk2": {**LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 64},
        "big_bird": {"block_size": 4, "num_random_blocks": 1, "attention_type": "original_full"},
        "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 1, "attention_type": "original_full"},
        "canine": {"num_hash_buckets": 64, "local_transformer_stride": 16},
        "cohere_compass_text": {
            **WINDOWED,
            "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        },
        "deepseek_v2": LATENT,
        "deepseek_v3": LATENT,
        "esmc": {"num_key_value_heads": 4},
        "funnel": {"architectures": ["FunnelModel"]},  # of two, AutoModel takes the one that is named
        "gemma4_text": {**WINDOWED, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
        "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
        "codegen": {"rotary_dim": 4},
        "gptj": {"rotary_dim": 4},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, **MAMBA},
        "layoutlm": {"max_2d_position_embeddings": 32},
        "layoutlmv3": {
            **{"coordinate_size": 4, "shape_size": 8, "input_size": 32, "patch_size": 16, "visual_embed": False},
            "max_2d_position_embeddings": 32,
        },
        "lilt": {"hidden_size": 48, "max_2d_position_embeddings": 32},
        "longformer": {"attention_window": [WINDOW, WINDOW]},
        "luke": {"entity_vocab_size": 16, "entity_emb_size": 8},
        "markuplm": {
            **{"max_xpath_tag_unit_embeddings": 256, "max_xpath_subs_unit_embeddings": 1024},
            **{"xpath_unit_hidden_size": 4, "max_depth": 5},
        },
        "minicpm3": LATENT,
        "mistral4": {
            **LATENT,
            "rope_parameters": {
                **ROPE,
                **{"partial_rotary_factor": 1.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1},
            },
        },
        "mobilebert": {"initializer_range": 0.05},  # without norms, scores would grow beyond any mask that is added
        "modernvbert": {"pixel_shuffle_factor": 1},
        "mra": {"block_per_row": 2},
        "neomme": {
            **WINDOWED,
            "embedding_rank": 16,
            "rope_parameters": {
                "full_attention": {**ROPE, "partial_rotary_factor": 0.5},
                "sliding_attention": {**ROPE, "partial_rotary_factor": 1.0},
            },
        },
        "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 8},
        "perceiver": {
            **{"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2},
            **{"num_self_attention_heads": 4, "num_cross_attention_heads": 4},
        },
        "qwen3_5_text": MIXED,
        "qwen3_next": MIXED,
        "reformer": {
            **{"axial_pos_shape": [8, 20], "axial_pos_embds_dim": [8, 24], "attn_layers": ["local", "lsh"]},
            **{"local_attn_chunk_length": WINDOW, "lsh_attn_chunk_length": WINDOW, "num_buckets": 4},
            **{"feed_forward_size": 48, "attention_head_size": 8, "is_decoder": False},
        },
        "roc_bert": {
            **{"pronunciation_embed_dim": 8, "pronunciation_vocab_size": 16},
            **{"shape_embed_dim": 8, "shape_vocab_size": VOCABULARY},
        },
        "squeezebert": {"embedding_size": 32},
        "t5": {"decoder_start_token_id": 0},
        "tapas": {"type_vocab_sizes": [3, 8, 8, 2, 8, 8, 4]},
        "xmod": {"default_language": "en_XX"},
        "zamba": {**SHARED, **MAMBA, "attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 2},
        "zamba2": {
            **SHARED,
            **{"mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 4, "chunk_size": 8, "adapter_rank": 4},
            "use_mem_eff_path": False,
        },
    }
)
"""What a family needs besides, or in place of, SIZES."""


def config(family: str, **changes: Any) -> Any:
    """Make a tiny config of a family."""
    made = CONFIG_MAPPING[family]
    return made(**_settings(made, {**OWN.get(family, {}), **changes}))


def _settings(made: type[PreTrainedConfig], own: Mapping[str, Any]) -> dict[str, Any]:
    usual = made()
    known = {*usual.to_dict(), *inspect.signature(made.__init__).parameters}
    settings = {name: value for name, value in SIZES.items() if name in known}
    for name in made.sub_configs:
        part = getattr(usual, name, None)
        if part is None:
            continue
        if "vision" in name:
            settings[name] = {size: value for size, value in SEEING.items() if size in part.to_dict()}
        else:
            settings[name] = _settings(type(part), OWN.get(part.model_type, {}))
    return {**settings, **own}


def classifier(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Make a random sequence classifier of three labels, in eval mode."""
    return _create(AutoModelForSequenceClassification, config(family, num_labels=3, **changes), seed)


def encoder(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Make a random model without a head, in eval mode."""
    return _create(AutoModel, config(family, **changes), seed)


def _create(auto: Any, settings: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return auto.from_config(settings).eval()
