"""Start copies ahead of their use, in the order learned from earlier passes.

Training repeats itself: every forward brings the same buckets in in the same order, and so does every
backward. So each bucket's successor is remembered, apart for forwards, recomputes and backwards, and
its copy is started while the bucket before it computes. A wrong guess costs a copy, never a wrong
number: whatever is used is fetched by name all the same.

Room is taken only from what is free within the limit, and from buckets whose backward is over:
looking ahead must not push out what the running backward still needs.

What this module does not do: it moves nothing; ``residency`` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from .buckets import Bucket
from .residency import Residency

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

    def end_forward(self) -> None:
        """Note that no forward runs any more."""
        self._forward.end_pass()

    def end_backward(self) -> None:
        """Note that a backward is over."""
        self._recompute.end_pass()
        self._backward.end_pass()
        self._reopened = None

    def _leave_reopened(self, bucket: Bucket) -> None:
        last = self._reopened() if self._reopened is not None else None
        if last is not None and last is not bucket:
            last.is_spent = True

    def _go_on(self, order: _Order, bucket: Bucket) -> None:
        order.note(bucket)
        for expected in order.ahead(bucket):
            if not self._residency.prefetch(expected):
                return


class _Order:
    """Remembers, for one kind of pass, which bucket followed which."""

    def __init__(self) -> None:
        self._successors: weakref.WeakKeyDictionary[Bucket, weakref.ref[Bucket]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Bucket] | None = None

    def note(self, bucket: Bucket) -> None:
        """Record that the bucket is in use now."""
        last = self._last() if self._last is not None else None
        if last is bucket:
            return
        if last is not None:
            self._successors[last] = weakref.ref(bucket)
        self._last = weakref.ref(bucket)

    def end_pass(self) -> None:
        """Forget where the pass was, so that its end is not linked to the next one's start."""
        self._last = None

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
