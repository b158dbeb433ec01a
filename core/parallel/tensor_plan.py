"""The vocabulary of tensor parallelism: which slice of each weight a rank holds, as data.

Every rank of a tensor group holds some attention heads and some channels of each feed-forward layer,
and computes all tokens with them. Nothing here knows tensors or ranks: ``tensor_shards`` works out
sizes, ``tensor_parallel`` runs it.

Words: a *unit* is what is never cut in two (an attention head). A *part* is one run of output or input
channels of a weight that belongs to one kind of unit; a fused weight has several, in their order:
``("heads", "heads", "heads", "mlp")`` is query, key, value and feed-forward in one Linear.

Source: Megatron-LM, arXiv:1909.08053. Different here: heads need not divide, fused weights are cut part
by part, and modulation layers, a third of some models, are sharded as well.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Channels that are dealt out to the ranks in whole units; kinds with equal counts are cut alike.

    Args:
        name: What the parts of weights call it; also for people.
        channels: Attribute path to the number of channels of all units; several are multiplied.
        count: Attribute path to the number of units, or None if any cut will do (feed-forward).
        scope: Path with wildcards of the modules that have so many, if they differ in it: attribute paths
            begin there, and what is inside of it is cut by its numbers. Empty: the model.
        optional: Whether some configurations of the class have no module at ``scope``.
    """

    name: str
    channels: str | tuple[str, ...]
    count: str | None = None
    scope: str = ""
    optional: bool = False


@dataclass(frozen=True)
class TensorRule:
    """What happens at the modules that ``path`` selects (see ``module_paths``).

    Args:
        path: Dotted path with wildcards.
        having: Attribute that must be there and true, else the rule does not apply to the module: a dotted
            path from the module, or with a leading ``/`` from the model.
        lacking: Attribute that must be missing or false.
        optional: Whether some configurations of the class have no module at ``path``.
    """

    path: str
    having: str = ""
    lacking: str = ""
    optional: bool = False


@dataclass(frozen=True)
class ColumnParallel(TensorRule):
    """A Linear of which each rank computes its own output channels.

    Args:
        parts: The units of the output channels, in order.
    """

    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowParallel(TensorRule):
    """A Linear over channels that each rank has a part of; outputs are summed over the ranks.

    Its bias stays on one rank, so it is added once.

    Args:
        parts: The units of the input channels, in order.
    """

    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class GatheredColumn(TensorRule):
    """A Linear or Embedding cut by output channels whose whole output every rank needs.

    For modulation, which works on a vector for each sample, and for tables of words: the output is small,
    and the weight is what counts.
    """


@dataclass(frozen=True)
class EmbeddingColumn(TensorRule):
    """An Embedding of which each rank holds some columns (position bias of its own heads).

    Args:
        parts: The units of the columns, in order.
    """

    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class NormAcrossRanks(TensorRule):
    """An RMSNorm over channels that each rank has a part of: the mean square is taken over all ranks.

    Args:
        parts: The units of the channels, in order.
    """

    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalAttribute(TensorRule):
    """A number that the model's own code reads as the count of something which a rank has a part of.

    Args:
        name: The attribute; its value on a rank is the rank's share of the units.
        unit: The units it counts, or whose channels it counts.
    """

    name: str = ""
    unit: str = ""


@dataclass(frozen=True)
class LocalArgument(TensorRule):
    """A whole tensor with one row for each unit (positions of each head), of which a rank keeps its own.

    Args:
        argument: Name in the module's ``forward``; a tuple is cut in its first entry.
        unit: The units.
        dim: The dim that holds them; of size 1 it is left as it is.
    """

    argument: str = ""
    unit: str = ""
    dim: int = 1


@dataclass(frozen=True)
class TensorPlan:
    """How the weights of one model class are cut over ranks. What no rule names, every rank holds whole.

    Args:
        units: Kinds of units; of one name there may be several, with different scopes.
        rules: In any order; a module may have at most one that cuts its weights.
    """

    units: tuple[Unit, ...]
    rules: tuple[TensorRule, ...]
