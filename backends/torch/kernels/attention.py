"""Attention of tree nodes over the cache and their own ancestors, as transformers' attention interface calls it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speclocal.backends.torch.cache import BatchView, View

NAME = "speclocal_tree"
FEW_ROWS = 32
"""Passes of up to so many rows pack the query heads of a key head; longer ones (prompts) would repeat the mask."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tree: View | BatchView | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Registered as `speclocal_tree`. query [1, H, n, d]; key, value [1, G, T, d]; returns [1, n, H, d].

    tree: which keys each row sees; handed through the model's forward. s_aux: per-head sink logits (gpt-oss).
    """
    if tree is None:
        raise RuntimeError(f"{type(module).__name__} does not hand keyword arguments to its attention function")
    if tree.groups:
        parts = [
            attention(
                module,
                query[first:last],
                key[first:last, :, : part.keys],
                value[first:last, :, : part.keys],
                None,
                scaling,
                sliding_window=sliding_window,
                softcap=softcap,
                s_aux=s_aux,
                tree=part,
            )[0]
            for first, last, part in tree.groups
        ]
        return torch.cat(parts), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    n, repeat = query.shape[2], query.shape[1] // key.shape[1]
    pack = n <= FEW_ROWS and softcap is None and s_aux is None
    if n == tree.rows:
        bias = tree.bias(sliding_window, query.dtype, repeat if pack else 1)
    else:
        # Layers that share keys are not run for rows whose logits nobody wants: only the last rows come here.
        bias = tree.bias(sliding_window, query.dtype)
        bias = None if bias is None else bias[-n:].repeat(repeat if pack else 1, 1)
    if pack:
        return packed(query, key, value, bias, scale), None
    if softcap is not None or s_aux is not None:
        return reference(query, key, value, bias, scale, softcap, s_aux), None
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=repeat > 1)
    return out.transpose(1, 2), None


def packed(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """torch's own attention with the query heads of a key head as rows of one product: keys are never repeated.

    query [B, H, n, d]; bias [H / G * n, T], [B, 1, H / G * n, T] or None.
    """
    texts, heads, n, d = query.shape
    rows = query.reshape(texts, key.shape[1], -1, d)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scale)
    return out.reshape(texts, heads, n, -1).transpose(1, 2)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition: softmax(q k^T * scale, capped, + bias [, sink]) v, with the softmax in float32."""
    texts, heads, n, d = query.shape
    groups = key.shape[1]
    packed = query.reshape(texts, groups, heads // groups * n, d)
    scores = (torch.matmul(packed, key.transpose(-1, -2)) * scale).float().view(texts, heads, n, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.float()
    if sinks is not None:
        column = sinks.float().view(1, heads, 1, 1).expand(texts, heads, n, 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    weights = weights.to(value.dtype).view(texts, groups, heads // groups * n, -1)
    return torch.matmul(weights, value).view(texts, heads, n, -1).transpose(1, 2)
