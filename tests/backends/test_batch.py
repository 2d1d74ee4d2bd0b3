"""The batch axis of the MLX cache: texts of different lengths, each with a tree of its own, in one pass."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from speclocal.core.tree import DraftTree
from tests.backends.play import SHAPES, TOLERANCE, host, ids, tree_of

mx = pytest.importorskip("mlx.core")

from speclocal.backends.mlx.cache import TreeCache, View  # noqa: E402
from tests.backends import tiny_mlx  # noqa: E402

BACKENDS = ("mlx",)
PROMPTS = [ids(3, 1), ids(40, 2), ids(17, 3)]
KINDS = ["llama", "qwen2", "gemma3_text", "mistral", "gpt_oss", "qwen3", "smollm3", "cohere2"]


def tokens_of(trees) -> object:
    """[B, N] ids, filled up with 0."""
    width = max(map(len, trees))
    return mx.array([[*tree.tokens, *[0] * (width - len(tree))] for tree in trees])


def run(model, cache: TreeCache, trees):
    cache.open(trees)
    return model(tokens_of(trees), cache=cache.layers)


def batch_equals_singles(kind: str) -> None:
    """Two rounds with commits along different paths: every row scores as the text does alone."""
    single = tiny_mlx.new(kind)
    cache = TreeCache(single.cache.windows, texts=len(PROMPTS))
    run(single.model, cache, [DraftTree.chain(prompt[0], prompt[1:-1]) for prompt in PROMPTS])
    mx.eval(cache.arrays)
    cache.commit_all([range(1, len(prompt) - 1) for prompt in PROMPTS])
    texts = [list(prompt) for prompt in PROMPTS]
    for round in range(3):
        shapes = list(SHAPES.values())[round:][: len(texts)]
        trees = [tree_of(shape, text[-1], seed=round) for shape, text in zip(shapes, texts, strict=True)]
        scored = np.array(run(single.model, cache, trees))
        paths = [tree.path(len(tree) - 1 - round) for tree in trees]
        for b, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            single.prefill([])
            single.prefill(text[:-1])
            expected = host(single, single.score(tree).logits)
            off = np.abs(scored[b, : len(tree)] - expected).max()
            assert off <= TOLERANCE, f"{kind}, round {round}, text {b}: off by {off:.1e}"
            assert np.isfinite(scored[b]).all(), "rows that stand for nothing stay finite"
            text += [tree.tokens[i] for i in paths[b]] + [5]
        cache.commit_all(paths)
        assert cache.lengths == [len(text) - 1 for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_batch_equals_singles(kind):
    batch_equals_singles(kind)


def of_the_longest(self):
    """Positions as if all texts were as long as the longest."""
    length = max(self._lengths)
    return np.array([[length + d for d in (*t.depth, *[0] * (self.stop - len(t)))] for t in self._trees])


def test_one_length_for_all_texts_is_caught():
    batch_equals_singles("llama")
    with mock.patch.object(View, "positions", property(of_the_longest)), pytest.raises(AssertionError):
        batch_equals_singles("llama")


def test_rows_kept_from_another_text_are_caught():
    cache_commit = TreeCache.commit_all

    def shifted(self, paths):
        cache_commit(self, [paths[0]] * len(paths) if all(paths) else paths)
        self.lengths = [n - len(paths[0]) + len(path) for n, path in zip(self.lengths, paths, strict=True)]

    with mock.patch.object(TreeCache, "commit_all", shifted), pytest.raises((AssertionError, ValueError)):
        batch_equals_singles("llama")
