"""BERT, and the weights of families with the same blocks under other names."""

from compress.families.family import Family

BERT_LAYER = r"(?:.*\.)?layer\.(?P<layer>\d+)"
ATTENTION_NAME = rf"{BERT_LAYER}\.attention"

FAMILY = Family(
    "bert",
    rules={
        # BERT, RoBERTa, ELECTRA, ERNIE, XLM-R; DeBERTa; DistilBERT
        r"(?:.*\.)?embeddings\.word_embeddings": "words: vocabulary embedding",
        r"(?:.*\.)?embeddings\.position_embeddings": "positions: . embedding",
        r"(?:.*\.)?embeddings\.token_type_embeddings": "types: . embedding",
        r"(?:.*\.)?embeddings\.task_type_embeddings": "tasks: . embedding",
        r"(?:.*\.)?embeddings\.LayerNorm": "embedding_norm: embedding",
        r"(?:.*\.)?embeddings_project|(?:.*\.)?embeddings\.embed_proj": "embedding_up: hidden embedding",
        r"(?:.*\.)?encoder\.rel_embeddings": "relative: . hidden",
        r"(?:.*\.)?encoder\.LayerNorm": "relative_norm: hidden",
        r"(?:.*\.)?encoder\.conv\.conv": "convolution: hidden hidden .",
        r"(?:.*\.)?encoder\.conv\.LayerNorm": "convolution_norm: hidden",
        rf"{ATTENTION_NAME}\.(?:self\.query(?:_proj)?|q_lin)": "query: query hidden",
        rf"{ATTENTION_NAME}\.(?:self\.key(?:_proj)?|k_lin)": "key: query hidden",
        rf"{ATTENTION_NAME}\.(?:self\.value(?:_proj)?|v_lin)": "value: value hidden",
        rf"{ATTENTION_NAME}\.self\.pos_query_proj": "position_query: query hidden",
        rf"{ATTENTION_NAME}\.self\.pos_key_proj": "position_key: query hidden",
        rf"{ATTENTION_NAME}\.(?:output\.dense|out_lin)": "attention_out: hidden value",
        rf"{BERT_LAYER}\.(?:attention\.output\.LayerNorm|sa_layer_norm)": "attention_norm: hidden",
        rf"{BERT_LAYER}\.(?:intermediate\.dense|ffn\.lin1)": "ffn_in: ffn hidden",
        rf"{BERT_LAYER}\.(?:output\.dense|ffn\.lin2)": "ffn_out: hidden ffn",
        rf"{BERT_LAYER}\.(?:output\.LayerNorm|output_layer_norm)": "ffn_norm: hidden",
        r"(?:.*\.)?pooler\.dense": "pooler: hidden hidden",
        r"pre_classifier|classifier\.dense": "pooler: hidden hidden",
        r"classifier(?:\.out_proj)?|qa_outputs": "classifier: . hidden",
        r"cls\.seq_relationship": "pair: . hidden",
        r"discriminator_predictions\.dense": "detector: hidden hidden",
        r"discriminator_predictions\.dense_prediction": "detector_out: . hidden",
        r"cls\.predictions\.transform\.dense|lm_head\.dense|vocab_transform": "lm: hidden hidden",
        r"cls\.predictions\.transform\.LayerNorm|lm_head\.layer_norm|vocab_layer_norm": "lm_norm: hidden",
        r"generator_predictions\.dense": "lm: embedding hidden",
        r"generator_predictions\.LayerNorm": "lm_norm: embedding",
        r"cls\.predictions\.decoder|lm_head\.decoder|vocab_projector|generator_lm_head": "lm_out: vocabulary embedding",
        r"cls\.predictions|lm_head": "lm_bias: vocabulary",
    },
    kin="bert",
    bert_embedding=True,
    gates=True,
    prepared_mask=True,
    counted=True,
    masked_by_feature=True,
)
