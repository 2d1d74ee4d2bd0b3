"""The seams: what a backend, a target and a drafter must offer.

Dimension letters, here and everywhere: N nodes, V vocabulary, D hidden, T context tokens, K children, E tapped layers,
B sequences, H / G query / key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from speclocal.core.tree import DraftTree

if TYPE_CHECKING:
    from speclocal.core.growth import Beam
    from speclocal.core.head_spec import TargetFacts
    from speclocal.core.sampling import Sampler

Array = Any
"""A tensor of whatever framework the backend runs."""


@dataclass(frozen=True)
class Ops:
    """The few array operations the core needs.

    xp:      the framework itself (`torch` or `mlx.core`), limited to names both spell alike.
    array:   (nested Python numbers) -> device array; ints become int32/int64, floats float32, bools bool.
    arange:  (n) -> device [n] integers.
    noise:   (seed, positions, purpose, tokens, stream) -> device [len(positions), K] float32 Gumbel noise keyed as in
             `core.noise`; `tokens` is an index array [K], or a number for the first so many.
    top:     (x [N, V], k) -> the k largest values of each row, descending [N, k], and their indices.
    to_host: (*arrays) -> the same as nested Python lists. The only synchronisation point.
    support: (scores [N, V], floor [N, 1]) -> indices of the columns that reach their row's floor in some row; None
             where arrays do not live in host memory, so that looking at a value would be another synchronisation.
    submit:  (*arrays) -> start computing them and return at once; None where a pass computes before it returns, so
             that nothing is gained.
    """

    xp: Any
    array: Callable[[Any], Array]
    arange: Callable[[int], Array]
    noise: Callable[..., Array]
    top: Callable[[Array, int], tuple[Array, Array]]
    to_host: Callable[..., list[Any]]
    support: Callable[[Array, Array], Array] | None = None
    submit: Callable[..., None] | None = None


@dataclass(frozen=True)
class Scores:
    """Device handles from one pass of a model.

    logits: [N, V] float32, raw. After `prefill`: None (the last prompt token is scored as the root of the first tree).
    taps:   [N, E, D] hidden states of the tapped layers, or None if no layer is tapped.
    """

    logits: Array = None
    taps: Array = None


class Origin(StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    """Drafted, checked and kept."""
    RECOVERED = "recovered"
    """The target's own token after it refused a draft (the correction)."""
    BONUS = "bonus"
    """The target's own token after it kept every draft of the path."""
    PLAIN = "plain"
    """The target's own token in a round without a draft."""


@dataclass(frozen=True)
class Acceptance:
    """Outcome of one round.

    path:   accepted nodes of the tree, root excluded.
    token:  the token the target adds after the path.
    origin: where `token` came from. `ACCEPTED` only when a stop cut the path, so that its last token is a drafted one.
    """

    path: tuple[int, ...]
    token: int
    origin: Origin

    def tokens(self, tree: DraftTree) -> tuple[int, ...]:
        """All tokens the round emits."""
        return (*(tree.tokens[i] for i in self.path), self.token)


class Target(Protocol):
    """A model with a cache: the one whose law we keep, or a draft model.

    The cache holds every committed token but the last one; that one is the root of the next tree.
    """

    ops: Ops
    vocab: int
    """Width V of the logits."""
    context: int
    """Most tokens the model can attend to."""
    trees: bool
    """False: only chains may be scored."""
    facts: TargetFacts
    """Sizes that a head which reads the target must fit."""

    @property
    def cached(self) -> Sequence[int]:
        """The token ids whose keys and values are in the cache."""

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> Scores:
        """Make the cache hold exactly `tokens`, reusing the longest common prefix with what is there.

        `progress` is told how many tokens have been processed. Raises ContextError if they do not fit. With taps, the
        last token of that prefix is processed once more: a head pairs its state with the token that comes next now.
        """

    def tap(self, points: Sequence[int]) -> None:
        """Which hidden states `Scores.taps` holds from now on, in this order.

        i = 0..L: the residual stream after i layers (0 the embeddings, L before the final norm); `head_spec.FEATURE`:
        after the final norm. Where points change, the cache is emptied: of its tokens these states are not known.
        """

    def embed(self, tokens: Array) -> Array:
        """Embeddings [n, D] of token ids [n], as the first layer gets them."""

    def unembed(self, hidden: Array) -> Array:
        """The output layer alone, without what a model does to its logits afterwards: [n, D] → [n, V]."""

    def output_rows(self, tokens: Array) -> Array | None:
        """Rows [n, D] of the output layer's matrix for ids [n]; None where they cannot be looked up one by one."""

    def score(self, tree: DraftTree, start: int = 0) -> Scores:
        """One pass over the nodes `start..N-1`; earlier nodes must have been scored since the last commit.

        Scores hold a row for each node of this pass. Node `i` sees the cache and its ancestors, at position
        `len(cached) + depth`. Tokens that are `core.pending.Pending` are read on the device: the host does not wait.
        """

    def commit(self, path: Sequence[int]) -> None:
        """Append the root and the nodes of `path` to the cache; forget the others. All must have been scored."""


class Batch(Protocol):
    """Texts side by side in slots, each at its own length, in one pass of a target that leaves its own cache alone.

    Taps are those the target was told to keep.
    """

    def read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Scores:
        """Begin a text in each of these slots: logits [n, V] after its last token, taps [n, T, E, D], T the longest."""

    def step(self, tokens: Array) -> Scores:
        """One more token [B] in every slot: logits [B, V], taps [B, 1, E, D]."""

    def keep(self, slots: Sequence[int]) -> None:
        """From now on there are only these slots, in this order."""

    def clear(self, slots: Sequence[int]) -> None:
        """These hold no text any more, so that they cost as little as they can."""


class Gradients(Protocol):
    """What training needs of an array library beside `Ops`."""

    def array(self, values: Any) -> Array:
        """A numpy array on the device, of the same type."""

    def numpy(self, array: Array) -> Any:
        """A device array as numpy."""

    def embed(self, tokens: Array) -> Array:
        """`Target.embed`, in float32 whatever the target computes in."""

    def unembed(self, hidden: Array) -> Array:
        """`Target.unembed`, from and to float32."""

    def of(
        self, loss: Callable[[dict[str, Array]], tuple[Array, Any]], params: Mapping[str, Array]
    ) -> tuple[Any, dict[str, Array]]:
        """What `loss` gives beside its number, and the gradient of that number for each of `params`."""

    def done(self, *arrays: Array) -> None:
        """Have these computed: the next step builds on them."""


class Head(Protocol):
    """A draft module with a cache of its own that reads the target's states: EAGLE and P-EAGLE. No policy inside.

    Row i pairs the target's state of position i with token i + 1. Logits are float32, [rows, Vd], Vd its columns.
    """

    rows: int
    """Positions whose states have been fed."""

    @property
    def ids(self) -> Array | None:
        """[Vd] the target's id of every column; None if columns are ids."""

    def borrow(self, tokens: Iterable[int], most: int) -> None:
        """Tokens of the text that the logits of the next round should have columns for, see `Columns.borrow`."""

    def truncate(self, rows: int) -> None:
        """Forget all but the first `rows` positions, and everything drafted."""

    def extend(self, tokens: Sequence[int], taps: Array, masks: int = 0) -> Array:
        """Feed states [n, E, D] with the tokens that follow them; logits of the last row and of so many mask rows."""

    def step(self, beam: Beam) -> Array:
        """Run drafted nodes below the rows of the call before; logits [k, Vd]."""


class ParallelHead(Protocol):
    """Draft modules that read one feature and look at nothing else: Medusa."""

    width: int

    def predict(self, feature: Array) -> Array:
        """Feature [D] → logits [heads, V], float32: row h for the token h + 1 places after the target's next."""


class Drafter(Protocol):
    """A way to guess. Sees only committed text and its own state; never decides acceptance."""

    name: str
    limit: Limit
    """The most it drafts in a round."""

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        """A new text starts with `tokens` (the last of them is the first root)."""

    def draft(self, limit: Limit) -> DraftTree:
        """Propose a tree below the last committed token; a tree of one node means no draft."""

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        """The round's outcome, of the last round too. `scores` are the target's for that tree."""


@dataclass(frozen=True)
class Limit:
    """How much may be drafted in a round.

    depth: longest path below the root.
    nodes: most nodes, root excluded.
    """

    depth: int
    nodes: int
