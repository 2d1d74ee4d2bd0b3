"""Several texts side by side in one pass, each with its own length: what writing training data needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from speclocal.backends.torch.cache import BLOCK, BatchView
from speclocal.backends.torch.target import TorchTarget
from speclocal.core.interfaces import Scores

GROUP = 12
"""Texts whose attention is one product over as many keys as the longest of them has: slots should be sorted."""
PAD = 8
"""Widths of prompts are multiples of this: for every new shape the kernels are prepared anew."""


class Batch:
    """Implements `core.interfaces.Batch` with the model of a target, whose own cache is left alone.

    slots: texts at once. Slots that hold no text are computed with the rest and mean nothing.
    """

    def __init__(self, target: TorchTarget, slots: int):
        self._target = target
        self._lengths = torch.zeros(slots, dtype=torch.long, device=target.device)
        self._cache = _Rows(slots)

    @torch.inference_mode()
    def read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Scores:
        """See Batch."""
        device = self._target.device
        sizes = torch.tensor([len(prompt) for prompt in prompts], device=device)
        width = -(-max(map(len, prompts)) // PAD) * PAD
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        positions = torch.arange(width, device=device)[None].expand(len(ids), -1)
        at = torch.tensor(list(slots), device=device)
        self._cache.prompt(at, width)
        # Padding stands behind each prompt, where a causal mask hides it.
        scores = self._run(ids, positions, BatchView(positions[:1], width), sizes - 1)
        self._lengths[at] = sizes
        return scores

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Scores:
        """See Batch."""
        held, self._lengths = self._lengths, self._lengths + 1
        longest = [max(part.tolist()) + 1 for part in held.split(GROUP)]
        self._cache.step(held, max(longest))
        groups = [
            (g * GROUP, min((g + 1) * GROUP, len(held)), BatchView(held[g * GROUP : (g + 1) * GROUP, None], keys))
            for g, keys in enumerate(longest)
        ]
        return self._run(tokens[:, None], held[:, None], BatchView(held[:, None], max(longest), groups), None)

    @torch.inference_mode()
    def keep(self, slots: Sequence[int]) -> None:
        """See Batch."""
        at = torch.tensor(list(slots), device=self._target.device)
        self._lengths = self._lengths[at]
        self._cache.keep(at, int(self._lengths.max()))

    @torch.inference_mode()
    def clear(self, slots: Sequence[int]) -> None:
        """See Batch."""
        self._lengths[torch.tensor(list(slots), device=self._target.device)] = 0

    def _run(self, ids: Tensor, positions: Tensor, view: BatchView, last: Tensor | None) -> Scores:
        target = self._target
        model, taps = target.model, target.taps
        taps.clear()
        common: dict[str, Any] = {"position_ids": positions, "cache": self._cache, "use_cache": True, "tree": view}
        if last is None:
            logits = model(input_ids=ids, **common).logits[:, 0]
        else:
            # Only the rows of last tokens are wanted of the logits, and they stand in different places.
            rows = torch.arange(len(ids), device=ids.device)
            hook = target.unembed.register_forward_pre_hook(lambda module, args: (args[0][rows, last][:, None],))
            try:
                logits = model(input_ids=ids, **common).logits[:, 0]
            finally:
                hook.remove()
        return Scores(logits.float(), taps.take_batch())


class _Rows(Cache):
    """Keys and values, `[slots, G, T, d]` per layer, as transformers' layers write and read them."""

    def __init__(self, slots: int) -> None:
        super().__init__(layers=[])
        self._slots = slots
        self._buffers: list[list[Tensor]] = [[], []]
        self._capacity = 0
        self._at: Tensor = torch.empty(0)
        self._first = 0
        self.end = 0

    def prompt(self, slots: Tensor, width: int) -> None:
        """The next pass writes positions 0..width-1 of these slots, and reads nothing else."""
        self._at, self._first, self.end = slots, -1, width
        self._reserve(width)

    def step(self, lengths: Tensor, end: int) -> None:
        """The next pass writes one position behind each slot's length."""
        self._at, self._first, self.end = lengths, 0, end
        self._reserve(end)

    def keep(self, slots: Tensor, used: int) -> None:
        """Only these slots, in this order; no text is longer than `used`."""
        same, self._slots = len(slots) == self._slots, len(slots)
        for buffers in self._buffers:
            for i, old in enumerate(buffers):
                if same:
                    old[:, :, :used] = old[slots, :, :used]
                else:
                    buffers[i] = old[slots]

    def _reserve(self, room: int) -> None:
        if room <= self._capacity:
            return
        self._capacity = -(-room // BLOCK) * BLOCK
        for buffers in self._buffers:
            for i, old in enumerate(buffers):
                buffers[i] = self._allocate(old)
                buffers[i][:, :, : old.shape[2]] = old

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._slots, like.shape[1], self._capacity, like.shape[3])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by every attention layer: store, return what the rows of this pass may read."""
        out = []
        for buffers, fresh in zip(self._buffers, (key_states, value_states), strict=True):
            if layer_idx == len(buffers):
                buffers.append(self._allocate(fresh))
            held = buffers[layer_idx]
            if self._first < 0:
                held[self._at, :, : self.end] = fresh
                out.append(fresh)
            else:
                held[torch.arange(len(held), device=held.device), :, self._at] = fresh[:, :, 0]
                out.append(held[:, :, : self.end])
        return out[0], out[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
