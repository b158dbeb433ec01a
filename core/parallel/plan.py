"""The vocabulary of parallel plans: how one model class is cut over ranks, as data.

A plan names modules, their arguments, and what happens to each. It holds no code and no tensors, so
it can be read, printed and checked before anything runs (``plan_check``). ``context_parallel`` holds
one small operator for each word here.

Words: a *stream* is one token sequence (text, image). A *region* is the part of the forward in which
streams are sharded: it opens with ``Split`` and closes with ``Gather``. The argument ``dim`` is always
the token dim.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .refused_inputs import RefusedInput
from .tensor_plan import TensorPlan


class ParallelMethod(enum.StrEnum):
    """A way of dividing the work that a plan can be proven for."""

    CFG = "cfg"
    BATCH = "batch"
    TENSOR = "tp"
    RING = "ring"
    ULYSSES = "ulysses"


@dataclass(frozen=True)
class InputAction:
    """What happens to one argument of a module before its forward.

    Args:
        argument: Name in the module's ``forward``; the call may pass it by position or by name. In a
            forward with ``*args``, ``args[0]`` is the first of those; one with ``**kwargs`` takes any name.
            Of an argument that is a tuple, ``pair[0]`` is the first item; then every item must be named.
        optional: Whether some supported version of the class has no such argument. A missing
            argument that is not optional is an error, never skipped.
    """

    argument: str
    optional: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Split(InputAction):
    """Open a stream: read its length from the argument, and keep this rank's part."""

    stream: str
    dim: int = 1


@dataclass(frozen=True)
class Local(InputAction):
    """The argument is this rank's part already (made by the block before); its length is checked."""

    streams: tuple[str, ...]
    dim: int = 1


@dataclass(frozen=True)
class Shard(InputAction):
    """Keep this rank's part of a whole tensor whose tokens are those of the streams, in that order."""

    streams: tuple[str, ...]
    dim: int = 1


@dataclass(frozen=True)
class ExpandThenShard(InputAction):
    """Shard a tensor that has one row for a run of tokens (one for each frame), or one for all.

    One row stays as it is. Otherwise ``S`` tokens share ``F`` rows in runs of ``S / F``, or of
    ``S // F + 1`` with a shorter last run where that does not divide.
    """

    stream: str
    dim: int = 1


@dataclass(frozen=True)
class ExpandRowsThenShard(InputAction):
    """As ``ExpandThenShard``, for an object that holds such a tensor and knows what a row stands for.

    A copy of the object is passed on, with one row for each of this rank's tokens (or one for all).

    Args:
        stream: The stream that the rows cover.
        rows: Attribute that holds the tensor, ``[B, F, C]``.
        run_length: Attribute that holds the tokens for each row; becomes 1.
        num_rows: Attribute that holds ``F``.
    """

    stream: str
    rows: str
    run_length: str
    num_rows: str


@dataclass(frozen=True)
class LocalIndex(InputAction):
    """An int that cuts the stream in two at a global index; becomes the index on this rank."""

    stream: str


@dataclass(frozen=True)
class LocalSlices(InputAction):
    """A list of ``(start, stop, value)`` over the stream's tokens; becomes the list on this rank.

    A ``stop`` of None is the end of the stream.

    Args:
        stream: The stream that the slices cover.
        after: A stream whose tokens come before it in the same tensor. The model has added that
            stream's length *on this rank* to global positions, and a slice from 0 covers it too.
    """

    stream: str
    after: str | None = None


@dataclass(frozen=True)
class LocalRanges(InputAction):
    """A list of ``(start, stop)`` over the stream's tokens; becomes the list on this rank."""

    stream: str


@dataclass(frozen=True)
class Truncate(InputAction):
    """Keep as many leading tokens as this rank has of the streams.

    For a model that cuts a joint tensor by a *global* length, which on a rank leaves tokens of the
    next stream at the end.
    """

    streams: tuple[str, ...]
    dim: int = 1


@dataclass(frozen=True)
class Replicated(InputAction):
    """The argument has no token dim: every rank keeps it whole."""


@dataclass(frozen=True)
class Absent(InputAction):
    """The argument must not be given: what it does over tokens is not covered by the plan."""


class MaskKeys(enum.Enum):
    """What an attention mask that reaches the attention function covers."""

    WHOLE = enum.auto()
    """``[..., 1 | S, S]`` in canonical order; the model made it before the region."""
    LOCAL = enum.auto()
    """``[..., 1, carried]``: a key mask over this rank's tokens, the same values in every block."""


@dataclass(frozen=True)
class SelfAttention:
    """Exactly one attention over all tokens of the streams, whose local order is given, runs inside.

    Args:
        streams: The streams.
        mask: What a mask covers.
        unless_option: Entry of ``transformer_options`` with which, if it is true, the module makes no
            attention call at all.
    """

    streams: tuple[str, ...]
    mask: MaskKeys = MaskKeys.WHOLE
    unless_option: str = ""


@dataclass(frozen=True)
class LocalAttention:
    """Attention of this rank's queries over keys that every rank has whole; needs no communication."""


@dataclass(frozen=True)
class ShardedKeysAttention:
    """Exactly one attention of queries that every rank has whole, over keys that are sharded, runs inside.

    Args:
        streams: The streams that the keys are made of. A mask is refused.
    """

    streams: tuple[str, ...]


AttentionRole = SelfAttention | LocalAttention | ShardedKeysAttention


def roles_of(attention: AttentionRole | tuple[AttentionRole, ...] | None) -> tuple[AttentionRole, ...]:
    """Return a rule's roles, whether it has none, one or several."""
    if attention is None:
        return ()
    return attention if isinstance(attention, tuple) else (attention,)


@dataclass(frozen=True)
class Gather:
    """Close the region: the module's output becomes the whole streams again on every rank.

    Args:
        streams: Streams of the output, in the order of its tokens.
        discard: Streams of the region that the model needs no more.
        dim: Token dim of the output.
        item: Which item of the output, if it is a tuple of several tensors; the others are kept.
    """

    streams: tuple[str, ...]
    discard: tuple[str, ...] = ()
    dim: int = 1
    item: int | None = None


@dataclass(frozen=True)
class ModuleRule:
    """What happens at the modules that ``path`` selects (see ``module_paths``).

    Args:
        path: Dotted path with wildcards.
        inputs: Done in this order. If any rule for a module has inputs, the rules together must name
            *every* argument of its forward, so that an argument that a newer model class brings is an
            error instead of a tensor left whole.
        attention: Role of the attention that runs inside; of several attention calls the roles, in
            the order of the calls.
        gather: Done to the output.
        having: Attribute (dotted path from the module, or with a leading ``/`` from the model) that must
            be there and true, else the rule does not apply to the module: a part that some blocks lack, a
            flag of some version of the class.
        lacking: Attribute that must be missing or false.
        optional: Whether some configurations of the class have no module at ``path``.
    """

    path: str
    inputs: tuple[InputAction, ...] = ()
    attention: AttentionRole | tuple[AttentionRole, ...] | None = None
    gather: Gather | None = None
    having: str = ""
    lacking: str = ""
    optional: bool = False


@dataclass(frozen=True)
class ControlResiduals:
    """ControlNet residuals that the model adds to a stream by ``stream[:, :n] += residual``.

    Args:
        argument: Argument of the whole model: a dict of lists of ``[B, n, C]`` or None.
        keys: Lists of that dict that the model adds.
        stream: The stream they are added to. They are cut when it opens.
        whole: Whether the model adds them to the whole stream (``stream += residual``) instead.
        run_into: A key, and the stream behind ``stream`` of which a rank's rows are added to as well, since
            the model counts them by the whole stream's length; they get zeros. Empty for none.
        run_into_having: As ``having`` of rules: the versions of the class that do so.
    """

    argument: str
    keys: tuple[str, ...]
    stream: str
    whole: bool = False
    run_into: tuple[str, str] | tuple[()] = ()
    run_into_having: str = ""


@dataclass(frozen=True)
class ModelPlan:
    """How one model class runs in parallel.

    Args:
        name: For people.
        class_path: Dotted path of the exact class; subclasses need plans of their own.
        heads: Path of the attribute that holds the number of attention heads; with wildcards for the
            modules, if modules differ: the fewest count.
        rules: In the order in which they apply.
        methods: Parallel methods proven by the shared parity tester.
        control: How ControlNet residuals enter, or None if the class reads none.
        whole_sequence_patches: Names in ``transformer_options["patches"]`` that the class calls
            outside the region, on whole tensors. Any other patch is refused.
        refused: Inputs that only a whole sequence can take.
        tensor: How its weights are cut over ranks, or None if they are not.
    """

    name: str
    class_path: str
    heads: str
    rules: tuple[ModuleRule, ...]
    methods: frozenset[ParallelMethod]
    control: ControlResiduals | None = None
    whole_sequence_patches: frozenset[str] = frozenset()
    refused: tuple[RefusedInput, ...] = ()
    tensor: TensorPlan | None = None
