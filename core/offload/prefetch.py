"""Start copies ahead of their use, in the order learned from earlier passes.

Training repeats itself: every forward brings the same buckets in in the same order, and so does every
backward. So each bucket's successor is remembered, apart for forwards, recomputes and backwards, and
its copy is started while the bucket before it computes. A wrong guess costs a copy, never a wrong
number: whatever is used is fetched by name all the same.

Room is taken only from what is free within the limit, and from buckets whose backward is over:
looking ahead must not push out what the running backward still needs.

After a backward nothing is left of it on the target, and the next forward would begin with a wait. Where that
is asked for, it begins with the weights that the backward ended with, which are still in their slots, and
the copies of what else fits are started before the optimizer's step. Only frozen parameters are: an
optimizer changes all others. Whatever changes one counts its version up, and the forward that comes fetches
it again; a write through ``.data`` alone leaves no trace and must not be made while the manager is attached.
They take room within the limit of streamed weights.

What this module does not do: it moves nothing; ``residency`` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .buckets import Bucket
from .residency import Residency
from .unobserved import run_unobserved

if TYPE_CHECKING:
    from .engine import Engine

# Far enough for leaf-sized buckets to fill a limit; for block-sized ones the limit itself stops it.
_MAX_AHEAD = 16


class LookAhead:
    """Learns the order of all passes and starts copies ahead.

    Args:
        residency: Does what is asked here.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._forward = _Order()
        self._recompute = _Order()
        self._backward = _Order()
        self._reopened: weakref.ref[Bucket] | None = None

    def used(self, bucket: Bucket, *, is_recompute: bool) -> None:
        """Note that a forward uses the bucket; ``is_recompute`` if a backward runs it."""
        if is_recompute:
            self._leave_reopened(bucket)
        self._go_on(self._recompute if is_recompute else self._forward, bucket)

    def reopened(self, bucket: Bucket) -> None:
        """Note that a backward uses the bucket."""
        self._leave_reopened(bucket)
        self._reopened = weakref.ref(bucket)
        self._go_on(self._backward, bucket)

    def start_next_forward(self) -> None:
        """Start the copies of frozen buckets that a forward like the last one begins with."""
        for bucket in self._forward.from_start():
            if bucket.is_constant() and not self._residency.prefetch(bucket):
                return

    def end_forward(self) -> None:
        """Note that no forward runs any more."""
        self._forward.end_pass()

    def end_backward(self) -> None:
        """Note that a backward is over."""
        self._recompute.end_pass()
        self._backward.end_pass()
        self._reopened = None

    def place_in_forward(self, bucket: Bucket) -> int:
        """Return when the last forward first used the bucket, as a count; after all others if it did not."""
        return self._forward.place(bucket)

    def _leave_reopened(self, bucket: Bucket) -> None:
        last = self._reopened() if self._reopened is not None else None
        if last is not None and last is not bucket:
            last.is_spent = True

    def _go_on(self, order: _Order, bucket: Bucket) -> None:
        order.note(bucket)
        for expected in order.ahead(bucket):
            if not self._residency.prefetch(expected):
                return


def start_next_forward(engine: Engine) -> None:
    """Start the copies that the next forward begins with, if nothing runs."""
    if engine.num_open_scopes == 0 and not engine.holding.is_on:
        with engine.lock:
            run_unobserved(engine.look_ahead.start_next_forward)


class _Order:
    """Remembers, for one kind of pass, which bucket followed which."""

    def __init__(self) -> None:
        self._successors: weakref.WeakKeyDictionary[Bucket, weakref.ref[Bucket]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Bucket] | None = None
        self._places: weakref.WeakKeyDictionary[Bucket, int] = weakref.WeakKeyDictionary()
        self._is_over = False

    def note(self, bucket: Bucket) -> None:
        """Record that the bucket is in use now."""
        last = self._last() if self._last is not None else None
        if last is bucket:
            return
        if last is not None:
            self._successors[last] = weakref.ref(bucket)
        self._last = weakref.ref(bucket)
        if self._is_over:
            self._places.clear()
            self._is_over = False
        self._places.setdefault(bucket, len(self._places))

    def place(self, bucket: Bucket) -> int:
        """Return how many others the latest pass used before this bucket."""
        return self._places.get(bucket, len(self._places))

    def from_start(self) -> Iterator[Bucket]:
        """Yield the buckets of the latest pass, in the order of their first use."""
        yield from sorted(self._places, key=self._places.__getitem__)

    def end_pass(self) -> None:
        """Forget where the pass was, so that its end is not linked to the next one's start."""
        self._last = None
        self._is_over = True

    def ahead(self, bucket: Bucket) -> Iterator[Bucket]:
        """Yield the buckets expected after this one, nearest first."""
        seen = {id(bucket)}
        reference = self._successors.get(bucket)
        while reference is not None and len(seen) <= _MAX_AHEAD:
            expected = reference()
            if expected is None or id(expected) in seen:
                return
            seen.add(id(expected))
            yield expected
            reference = self._successors.get(expected)
