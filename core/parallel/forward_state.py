"""What one forward of a parallel model knows: open streams, the role of attention, what was sharded.

``ForwardState`` lives for one forward: stream lengths differ between calls (a negative prompt has
another length), so nothing about them outlives it. Whether a rank enters a collective depends only
on shapes and arguments that are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F

from ..errors import PlanError
from .attention.local import AttentionFunction, parse_call
from .attention.masks import MaskMemo
from .attention.sharded_keys import sharded_keys_attention
from .attention.unified import sequence_attention
from .mesh import SequenceGroup
from .plan import (
    AttentionRole,
    ControlResiduals,
    LocalAttention,
    MaskKeys,
    SelfAttention,
    ShardedKeysAttention,
)
from .sequence import Stream, Streams, drop_phantoms, joint_sizes, restore_phantoms, split_sizes, take


@dataclass
class _RoleScope:
    """A module with attention roles that is running now."""

    roles: tuple[AttentionRole, ...]
    num_calls: int = 0

    @property
    def counted(self) -> bool:
        """Whether there must be one call for each role; any number may need no communication."""
        return any(not isinstance(role, LocalAttention) for role in self.roles)

    def next_role(self) -> AttentionRole:
        """Return the role of the next call; calls that are too many are refused at the end."""
        if not self.roles:
            raise PlanError("a module made an attention call although an option says that it makes none")
        role = self.roles[min(self.num_calls, len(self.roles) - 1)]
        self.num_calls += 1
        return role


class ForwardState:
    """Everything that one forward of a parallel model knows.

    Args:
        group: The ranks that share the sequence.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group.whole)
        self.num_ranks = dist.get_world_size(group.whole)
        self._open: dict[str, Stream] = {}
        self._roles: list[_RoleScope] = []
        self._shards: dict[tuple, tuple[Any, Any]] = {}
        self._masks = MaskMemo(group.whole)
        self._control: tuple[ControlResiduals, dict[str, Any]] | None = None

    def streams(self, names: tuple[str, ...]) -> Streams:
        """Return open streams by name.

        Raises:
            PlanError: If one is not open.
        """
        closed = [name for name in names if name not in self._open]
        if closed:
            raise PlanError(
                f"streams {closed} are used outside their region; open ones are {list(self._open)}"
            )
        return tuple(self._open[name] for name in names)

    def open(self, name: str, length: int) -> Stream:
        """Open a stream of ``length`` tokens and cut it over the ranks.

        Raises:
            PlanError: If it is open already.
        """
        if name in self._open:
            raise PlanError(f"stream {name!r} was opened twice without a gather between")
        self._open[name] = Stream(name, split_sizes(length, self.num_ranks), self.rank)
        if self._control is not None and self._control[0].stream == name:
            residuals, control = self._control
            behind = self.streams(residuals.run_into[1:])
            _cut_residuals(residuals, control, self._open[name], behind)
            self._control = None
        return self._open[name]

    def close(self, names: tuple[str, ...]) -> None:
        """Close streams."""
        for name in names:
            del self._open[name]

    def defer_control(self, residuals: ControlResiduals, control: dict[str, Any]) -> dict[str, Any]:
        """Return a private copy of ``control`` whose residuals are cut when their stream opens."""
        copy = {key: list(value) if key in residuals.keys else value for key, value in control.items()}
        self._control = (residuals, copy)
        return copy

    def check_closed(self) -> None:
        """Check that every region was closed.

        Raises:
            PlanError: If not; the output would be one rank's part.
        """
        if self._open:
            raise PlanError(f"the model returned with streams {list(self._open)} still sharded")

    def shard_once(self, key: tuple, source: Any, shard: Callable[[], Any]) -> Any:
        """Return ``shard()``, computed once in a forward for the same source and key.

        Blocks receive the same position table again and again. The source is kept, so its id stays
        its own.
        """
        whole_key = (id(source), *key)
        if whole_key not in self._shards:
            self._shards[whole_key] = (source, shard())
        return self._shards[whole_key][1]

    @contextmanager
    def attention_roles(
        self, roles: tuple[AttentionRole, ...], path: str, options: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        """Give attention calls inside the block these roles, one after the other.

        Args:
            roles: The roles.
            path: Path of the module, for messages.
            options: The ``transformer_options`` that the module gets, if any.

        Raises:
            PlanError: If a self-attention did not come through exactly once: the model would have
                attended to this rank's tokens only.
        """
        given = options or {}
        skipped = [isinstance(role, SelfAttention) and bool(given.get(role.unless_option)) for role in roles]
        scope = _RoleScope(tuple(role for role, skip in zip(roles, skipped, strict=True) if not skip))
        self._roles.append(scope)
        try:
            yield
        finally:
            self._roles.pop()
        if (scope.counted or any(skipped)) and scope.num_calls != len(scope.roles):
            raise PlanError(
                f"{path} made {scope.num_calls} attention calls through the override, "
                f"expected {len(scope.roles)}. "
                "Pass ParallelHandle.attention_override to the model as its attention override."
            )

    def attend(
        self, function: AttentionFunction, tensors: tuple, heads: int, args: tuple, kwargs: dict
    ) -> Any:
        """Run one attention call by the role of the module it is in.

        Raises:
            PlanError: If it is inside a region but no module there has a role.
        """
        scope = self._roles[-1] if self._roles else None
        if scope is None:
            if self._open:
                raise PlanError("an attention call inside a sharded region has no role in the plan")
            return function(*tensors, heads, *args, **kwargs)
        role = scope.next_role()
        if isinstance(role, LocalAttention):
            return function(*tensors, heads, *args, **kwargs)
        streams = self.streams(role.streams)
        call = parse_call(function, tensors, heads, args, kwargs)
        if isinstance(role, ShardedKeysAttention):
            k, v = (drop_phantoms(tensor, streams, 2) for tensor in (call.k, call.v))
            return call.as_asked(sharded_keys_attention(replace(call, k=k, v=v), group=self.group.whole))
        mask = call.mask
        if mask is not None and role.mask is MaskKeys.WHOLE:
            mask = self._masks.from_whole(mask, streams)
        elif mask is not None:
            mask = self._masks.from_local_keys(mask, streams)
        q, k, v = (drop_phantoms(tensor, streams, 2) for tensor in (call.q, call.k, call.v))
        call = replace(call, q=q, k=k, v=v)
        output = sequence_attention(call, token_sizes=joint_sizes(streams), mask=mask, group=self.group)
        return call.as_asked(restore_phantoms(output, streams, 1))


def _cut_residuals(
    residuals: ControlResiduals, control: dict[str, Any], stream: Stream, behind: Streams
) -> None:
    """Replace each residual ``[B, n, C]`` for the first ``n`` tokens by this rank's rows of it.

    Raises:
        PlanError: If there are more rows than tokens, or fewer where the whole stream is meant.
    """
    for key in residuals.keys:
        for index, residual in enumerate(control.get(key) or ()):
            if residual is None:
                continue
            if residuals.whole:
                rows = take(residual, (stream,), 1)
                if key in residuals.run_into:
                    carried = stream.carried_length + sum(other.carried_length for other in behind)
                    more = min(stream.length, carried) - stream.carried_length
                    rows = F.pad(rows, (0, 0, 0, max(0, more)))
                control[key][index] = rows
                continue
            num_rows = residual.shape[1]
            if num_rows > stream.length:
                raise PlanError(
                    f"a ControlNet residual has {num_rows} tokens, but {stream.name} has {stream.length}"
                )
            control[key][index] = residual[:, min(stream.start, num_rows) : min(stream.stop, num_rows)]
