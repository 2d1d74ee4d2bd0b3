"""A transformers model as a Target: tree attention, own cache, taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speclocal.backends.torch.cache import TreeCache, View
from speclocal.backends.torch.linear import PackedLinear
from speclocal.backends.torch.ops import make_ops
from speclocal.core.cached_target import CachedTarget
from speclocal.core.head_spec import FEATURE, TargetFacts
from speclocal.core.interfaces import Scores
from speclocal.core.pending import Pending
from speclocal.core.tree import DraftTree

FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm")


class TorchTarget(CachedTarget):
    """Implements `core.interfaces.Target` over a causal language model of transformers, left as it is.

    model:   loaded with the attention implementation `speclocal_tree`.
    context: most positions it may use.
    taps:    see `tap`.
    """

    def __init__(self, model: Any, context: int, taps: Sequence[int] = ()):
        super().__init__()
        self.model, self.context = model, context
        self.trees = True
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.ops = make_ops(self.device)
        self.vocab = int(model.config.get_text_config().vocab_size)
        self.cache = TreeCache()
        config = model.config.get_text_config()
        self._embedding, self.unembed = model.get_input_embeddings(), model.get_output_embeddings()
        self._tied = bool(getattr(config, "tie_word_embeddings", False))
        self.facts = TargetFacts(config.num_hidden_layers, config.hidden_size, len(self._embedding.weight), context)
        self.taps = Taps(model, taps)
        self.points = self.taps.points

    def tap(self, points: Sequence[int]) -> None:
        """See Target."""
        if tuple(points) != self.taps.points:
            self.taps.remove()
            self.taps = Taps(self.model, points)
            self.points = self.taps.points
            self.prefill([])

    @torch.no_grad()  # and not inference mode: training reads these
    def embed(self, tokens: Tensor) -> Tensor:
        """See Target."""
        return self._embedding(tokens)

    @torch.no_grad()
    def output_rows(self, tokens: Tensor) -> Tensor | None:
        """See Target. A packed matrix shows no rows, but for one that is the embedding too."""
        if type(self.unembed) is nn.Linear:
            return self.unembed.weight[tokens]
        if isinstance(self.unembed, PackedLinear) and self._tied:
            return self._embedding.weight[tokens]
        return None

    def run(self, tree: DraftTree, start: int) -> Scores:
        return self._run(tree, start, rows=0)

    def read_prompt(self, tree: DraftTree) -> Tensor | None:
        # One row is all that reaches the output layer.
        return self._run(tree, 0, rows=1).taps

    @torch.inference_mode()
    def _run(self, tree: DraftTree, start: int, rows: int) -> Scores:
        view = View(self.cache.length, tree, start, self.device)
        self.cache.open(start, len(tree))
        self.taps.clear()
        out = self.model(
            input_ids=self._ids(tree.tokens, start),
            position_ids=view.positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=rows,
            tree=view,
        )
        return Scores(out.logits[0].float(), self.taps.take())

    def _ids(self, tokens: Sequence[int], start: int) -> Tensor:
        """[1, n] the tokens from `start` on; those that are on the device are not looked at."""
        if isinstance(tokens, Pending):
            return tokens.array[None, start:]
        return torch.tensor([tokens[start:]], device=self.device)

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """See Target."""
        super().commit(path)


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
            self._held[point] = output[0] if isinstance(output, tuple) else output

        return keep

    def _input(self, point: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._held[point] = args[0] if args else kwargs["hidden_states"]

        return keep

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        self._held.clear()

    def take(self) -> Tensor | None:
        """[n, E, D], or None without taps."""
        return torch.stack([self._held[i][0] for i in self.points], 1) if self.points else None

    def take_batch(self) -> Tensor | None:
        """[B, n, E, D], or None without taps."""
        return torch.stack([self._held[i] for i in self.points], 2) if self.points else None
