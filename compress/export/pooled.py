"""An encoder whose tokens become one vector, as the one module that is exported. B batch, L tokens, D hidden."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.export.pooling import Pool, Reading


class Pooled(nn.Module):
    """ids and mask -> last_hidden_state (B, L, D) and, where it pools, sentence_embedding (B, D), as
    sentence-transformers computes them."""

    def __init__(self, encoder: Any, reading: Reading) -> None:
        super().__init__()
        self.encoder, self.reading = encoder, reading

    @property
    def config(self) -> Any:
        return self.encoder.config

    def set_attn_implementation(self, name: str) -> None:
        self.encoder.set_attn_implementation(name)

    def forward(
        self, input_ids: Tensor, attention_mask: Any, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """`attention_mask`: 0 or 1 per token, or what `onnx.prepared` makes of it."""
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        found = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **segments).last_hidden_state
        if self.reading.pool is None:
            return {"last_hidden_state": found}
        vectors_BD = pooled(found, _seen(attention_mask), self.reading.pool)
        if self.reading.normalise:
            vectors_BD = functional.normalize(vectors_BD, dim=1)
        return {"last_hidden_state": found, "sentence_embedding": vectors_BD}


def pooled(tokens_BLD: Tensor, seen_BL: Tensor, pool: Pool) -> Tensor:
    """One vector (B, D) of the tokens that are seen."""
    if pool == "cls":
        return tokens_BLD[:, 0]
    seen_BL1 = seen_BL[:, :, None]
    if pool == "max":
        return tokens_BLD.masked_fill(~seen_BL1, torch.finfo(torch.float32).min).max(1).values
    weights_BL1 = seen_BL1.to(tokens_BLD.dtype)
    return (tokens_BLD * weights_BL1).sum(1) / weights_BL1.sum(1).clamp(min=1e-9)


def _seen(mask: Any) -> Tensor:
    """Which tokens (B, L) there are. The last token of a prepared mask sees as many as any."""
    full: Tensor = mask["full_attention"] if isinstance(mask, dict) else mask
    return full.bool() if full.dim() == 2 else full[:, 0, -1, :] == 0
