"""A transformers model as a Target: tree attention, own cache, taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speclocal.backends.torch.cache import TreeCache, View
from speclocal.backends.torch.ops import make_ops
from speclocal.core.interfaces import Scores
from speclocal.core.pending import Pending
from speclocal.core.prefix import shared_prefix
from speclocal.core.tree import DraftTree
from speclocal.errors import ContextError

CHUNK = 256
"""Prompt tokens per pass: bounds the memory of activations and masks."""


class TorchTarget:
    """Implements `core.interfaces.Target` over a causal language model of transformers, left as it is.

    model:   loaded with the attention implementation `speclocal_tree`.
    context: most positions it may use.
    taps:    numbers of the decoder layers whose output hidden states `Scores.taps` holds, in this order.
    """

    def __init__(self, model: Any, context: int, taps: Sequence[int] = ()):
        self.model, self.context = model, context
        self.trees = True
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.ops = make_ops(self.device)
        self.vocab = int(model.config.get_text_config().vocab_size)
        self.cache = TreeCache()
        self._cached: list[int] = []
        self._tree = DraftTree.chain(0)
        self._scored = 0
        self._taps = Taps(model, taps)

    @property
    def cached(self) -> Sequence[int]:
        """Committed token ids whose keys and values are in the cache."""
        return self._cached

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> Scores:
        """See Target. Taps cover the tokens that were not in the cache already."""
        if len(tokens) > self.context:
            raise ContextError(
                "the text is longer than the context", got=f"{len(tokens)} tokens", expected=f"at most {self.context}"
            )
        if len(self._cached) != self.cache.length:
            self._cached.clear()  # a commit was interrupted: what the cache holds is not known
        same = shared_prefix(tokens, self._cached)
        self.cache.truncate(same)
        del self._cached[same:]
        self._scored = 0
        self.cache.reserve(min(len(tokens) + CHUNK, self.context))
        taps = []
        for first in range(same, len(tokens), CHUNK):
            chunk = tokens[first : first + CHUNK]
            # The prompt is a chain; its logits are not needed, so one row is all that reaches the output layer.
            taps.append(self._run(DraftTree.chain(chunk[0], chunk[1:]), 0, rows=1).taps)
            self.commit(range(1, len(chunk)))
            if progress:
                progress(first + len(chunk))
        return Scores(taps=torch.cat(taps) if self._taps.layers and taps else None)

    def score(self, tree: DraftTree, start: int = 0) -> Scores:
        """See Target."""
        if start not in (0, self._scored):
            raise ValueError(f"nodes before {start} must be scored first, only {self._scored} are")
        return self._run(tree, start, rows=0)

    @torch.inference_mode()
    def _run(self, tree: DraftTree, start: int, rows: int) -> Scores:
        view = View(self.cache.length, tree, start, self.device)
        self.cache.open(start, len(tree))
        self._taps.clear()
        out = self.model(
            input_ids=self._ids(tree.tokens, start),
            position_ids=view.positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=rows,
            tree=view,
        )
        self._tree, self._scored = tree, len(tree)
        return Scores(out.logits[0].float(), self._taps.take())

    def _ids(self, tokens: Sequence[int], start: int) -> Tensor:
        """[1, n] the tokens from `start` on; those that are on the device are not looked at."""
        if isinstance(tokens, Pending):
            return tokens.array[None, start:]
        return torch.tensor([tokens[start:]], device=self.device)

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """See Target."""
        if self._scored <= max(path, default=0):
            raise ValueError(f"node {max(path, default=0)} was not scored, only {self._scored} nodes are")
        self.cache.commit(path)
        self._cached.append(self._tree.tokens[0])
        self._cached.extend(self._tree.tokens[i] for i in path)
        self._scored = 0


class Taps:
    """Keeps the outputs of chosen decoder layers during a pass."""

    def __init__(self, model: Any, layers: Sequence[int]):
        self.layers = tuple(layers)
        self._held: dict[int, Tensor] = {}
        decoder = model.get_decoder()
        for number in self.layers:
            decoder.layers[number].register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._held[number] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    def clear(self) -> None:
        self._held.clear()

    def take(self) -> Tensor | None:
        """[n, E, D], or None without taps."""
        return torch.stack([self._held[i] for i in self.layers], 1) if self.layers else None
