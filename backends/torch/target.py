"""A transformers model as a Target: tree attention, own cache, taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speclocal.backends.torch.cache import TreeCache, View
from speclocal.backends.torch.ops import make_ops
from speclocal.core.head_spec import FEATURE, TargetFacts
from speclocal.core.interfaces import Scores
from speclocal.core.pending import Pending
from speclocal.core.prefix import shared_prefix
from speclocal.core.tree import DraftTree
from speclocal.errors import ContextError

FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm")
CHUNK = 256
"""Prompt tokens per pass: bounds the memory of activations and masks."""


class TorchTarget:
    """Implements `core.interfaces.Target` over a causal language model of transformers, left as it is.

    model:   loaded with the attention implementation `speclocal_tree`.
    context: most positions it may use.
    taps:    see `tap`.
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
        config = model.config.get_text_config()
        self._embedding, self.unembed = model.get_input_embeddings(), model.get_output_embeddings()
        self.facts = TargetFacts(config.num_hidden_layers, config.hidden_size, len(self._embedding.weight), context)
        self._taps = Taps(model, taps)

    def tap(self, points: Sequence[int]) -> None:
        """See Target."""
        if tuple(points) != self._taps.points:
            self._taps.remove()
            self._taps = Taps(self.model, points)
            self.prefill([])

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """See Target."""
        return self._embedding(tokens)

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
        if self._taps.points:
            same = max(same - 1, 0)
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
        return Scores(taps=torch.cat(taps) if self._taps.points and taps else None)

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
    """Keeps hidden states of chosen points (see `Target.tap`) during a pass."""

    def __init__(self, model: Any, points: Sequence[int]):
        self.points = tuple(points)
        self._held: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        decoder = model.get_decoder()
        for point in self.points:
            if point == FEATURE:
                norm = next(getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name))
                self._hooks.append(norm.register_forward_hook(self._output(point)))
            elif point == 0:
                self._hooks.append(decoder.layers[0].register_forward_pre_hook(self._input(point), with_kwargs=True))
            else:
                self._hooks.append(decoder.layers[point - 1].register_forward_hook(self._output(point)))

    def _output(self, point: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._held[point] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    def _input(self, point: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._held[point] = (args[0] if args else kwargs["hidden_states"])[0]

        return keep

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        self._held.clear()

    def take(self) -> Tensor | None:
        """[n, E, D], or None without taps."""
        return torch.stack([self._held[i] for i in self.points], 1) if self.points else None
