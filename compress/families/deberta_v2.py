"""DeBERTa's versions 2 and 3: BERT's blocks with disentangled attention, and a
factorised embedding in some."""

from dataclasses import replace

from compress.families import bert

FAMILY = replace(
    bert.FAMILY,
    name="deberta-v2",
    projects_if_different=True,
    disentangled=True,
    bert_embedding=False,
    undeclared=(
        "share_att_key",
        "position_buckets",
        "norm_rel_ebd",
        "conv_kernel_size",
        "conv_groups",
        "conv_act",
    ),
    gates=False,
    prepared_mask=False,
    counted=False,
    masked_by_feature=False,
)
