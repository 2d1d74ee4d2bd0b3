"""Draft trees: structure, masks, merging."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speclocal.core.interfaces import Ops
from speclocal.core.tree import DraftTree, TreeBuilder
from tests.toys import double

#       0
#     / | \
#    1  2  5
#   / \    |
#  3   4   6
BUSHY = DraftTree((9, 1, 2, 3, 4, 5, 6), (-1, 0, 0, 1, 1, 0, 5))


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    parents = [-1, *(draw(st.integers(0, i)) for i in range(draw(st.integers(0, 20))))]
    tokens = draw(st.lists(st.integers(0, 3), min_size=len(parents), max_size=len(parents)))
    return DraftTree(tuple(tokens), tuple(parents))


def test_a_tree_by_hand() -> None:
    assert BUSHY.depth == (0, 1, 1, 2, 2, 1, 2)
    assert BUSHY.children == ((1, 2, 5), (3, 4), (), (), (), (6,), ())
    assert BUSHY.ancestors == (0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100001, 0b1100001)
    assert BUSHY.path(6) == (5, 6)
    assert BUSHY.path(0) == ()
    assert not BUSHY.is_chain
    assert len(BUSHY) == 7


@given(trees())
def test_structure_agrees_with_itself(tree: DraftTree) -> None:
    for node in range(len(tree)):
        path = tree.path(node)
        assert len(path) == tree.depth[node]
        assert all(tree.parents[b] == a for a, b in zip((0, *path), path, strict=False))
        assert tree.ancestors[node] == sum(1 << i for i in {0, *path})
        assert all(tree.parents[child] == node for child in tree.children[node])
    assert sorted(child for kids in tree.children for child in kids) == list(range(1, len(tree)))
    assert tree.is_chain == (max(tree.depth) == len(tree) - 1)


def test_chain(ops: Ops) -> None:
    q = double(ops, [[0.5, 0.5]] * 3)
    tree = DraftTree.chain(7, [1, 2], q, "iid")
    assert (tree.tokens, tree.parents, tree.siblings) == ((7, 1, 2), (-1, 0, 1), "iid")
    assert tree.q is q
    assert tree.is_chain
    assert DraftTree.chain(7).is_chain


def test_draw_order_is_kept() -> None:
    """Siblings stay as they were drawn, duplicates included: the order is part of the rejection rule."""
    tree = DraftTree((0, 3, 1, 3, 2), (-1, 0, 0, 0, 0))
    assert [tree.tokens[i] for i in tree.children[0]] == [3, 1, 3, 2]


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [((), ()), ((1, 2), (-1,)), ((1,), (0,)), ((1, 2), (-1, 1)), ((1, 2, 3), (-1, 2, 0)), ((1, 2), (-1, -1))],
)
def test_impossible_trees_are_refused(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"tree|parents"):
        DraftTree(tokens, parents)


def test_builder_merges_common_prefixes() -> None:
    builder = TreeBuilder(9)
    for path in ([1, 2, 3], [1, 2, 4], [5], [1, 2, 3]):
        builder.add(path, 100)
    tree = builder.build()
    assert [tuple(tree.tokens[i] for i in tree.path(n)) for n in range(len(tree))] == [
        (),
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 4),
        (5,),
    ]
    assert tree.siblings == "one-hot"
    assert tree.q is None


def test_builder_respects_the_limit() -> None:
    """The limit counts the root; a full tree still lets paths run along nodes that are there."""
    builder = TreeBuilder(9)
    builder.add([1, 2, 3], 3)
    builder.add([1, 2], 3)
    builder.add([1, 4], 3)
    assert builder.build().tokens == (9, 1, 2)
