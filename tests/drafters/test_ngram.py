"""What prompt lookup proposes."""

from __future__ import annotations

import pytest

from speclocal.core.interfaces import Acceptance, Limit, Origin, Scores
from speclocal.core.tree import DraftTree
from speclocal.drafters import read_settings
from speclocal.drafters.ngram import Drafter, Settings
from speclocal.errors import UsageError

WIDE = Limit(15, 15)


def propose(tokens: list[int], limit: Limit = WIDE, **settings: float) -> DraftTree:
    drafter = Drafter(Settings(**{"confidence": 0.0, **settings}))
    drafter.begin(tokens, Scores(), None)
    return drafter.draft(limit)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(n)) for n in range(len(tree)) if not tree.children[n]}


def test_what_followed_is_proposed_again() -> None:
    tree = propose([1, 2, 3, 4, 5, 6, 1, 2, 3], topk=1)
    assert tree.is_chain
    assert tree.tokens == (3, 4, 5, 6, 1, 2, 3)


def test_continuations_become_a_tree() -> None:
    tree = propose([1, 2, 7, 0, 1, 2, 8, 0, 1, 2])
    assert {(8,), (7,)} <= {p[:1] for p in paths(tree)}


def test_shorter_suffixes_add_siblings_unless_a_chain_is_asked_for() -> None:
    text = [5, 1, 2, 9, 4, 2, 6, 5, 1, 2]
    assert {p[0] for p in paths(propose(text))} == {9, 6}
    assert propose(text, topk=1).is_chain


@pytest.mark.parametrize("tokens", [[3], [1, 2, 3, 4]])
def test_no_repeat_means_no_draft(tokens: list[int]) -> None:
    assert len(propose(tokens)) == 1


def test_limits_are_kept() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    assert max(propose(text, Limit(3, 15)).depth) == 3
    assert len(propose(text, Limit(15, 4))) == 5
    assert len(propose(text, Limit(0, 0))) == 1
    assert len(propose(text, min=40)) == 1


def test_drafts_follow_the_answer_too_and_a_new_text_starts_over() -> None:
    drafter = Drafter(Settings(confidence=0.0, topk=1))
    drafter.begin([1, 2], Scores(), None)
    tree = drafter.draft(WIDE)
    assert len(tree) == 1
    for token in (3, 1):
        drafter.commit(tree, Acceptance((), token, Origin.PLAIN), Scores())
    tree = drafter.draft(WIDE)
    assert tree.tokens[:2] == (1, 2)
    drafter.begin([9, 8, 9], Scores(), None)
    assert drafter.draft(WIDE).tokens == (9, 8, 9)


def test_misses_make_it_careful_and_hits_bold() -> None:
    text = [1, 2, 3] * 5
    right, wrong = Drafter(Settings(confidence=0.2)), Drafter(Settings(confidence=0.2))
    for drafter in (right, wrong):
        drafter.begin(text, Scores(), None)
    for _ in range(12):
        tree = right.draft(Limit(3, 3))
        path = tuple(range(1, len(tree)))
        right.commit(tree, Acceptance(path, tree.tokens[-3] if path else 1, Origin.BONUS), Scores())
    sizes = []
    for i in range(12):
        tree = wrong.draft(WIDE)
        sizes.append(len(tree))
        wrong.commit(tree, Acceptance((), 1000 + i, Origin.RECOVERED), Scores())
        wrong.begin(text, Scores(), None)
    assert sizes[-1] < sizes[0]


def test_impossible_settings_are_refused() -> None:
    for bad in ({"min": "0"}, {"min": "9", "max": "3"}, {"nodes": "-1"}, {"depth": "1000"}, {"confidence": "2"}):
        with pytest.raises(UsageError):
            read_settings(Settings, "ngram", bad)
    for bad in ({"depth": "1.9"}, {"depth": "many"}, {"depths": "3"}):
        with pytest.raises(UsageError, match=r"whole number|no setting"):
            read_settings(Settings, "ngram", bad)
    assert read_settings(Settings, "ngram", {"depth": "4 "}).depth == 4
