"""Buckets that stay on the target until a stretch of several forwards and backwards is over.

What this module does not do: it pins; the engine unpins when the stretch ends.
"""

from __future__ import annotations

from .buckets import Bucket
from .hooks import Scope
from .residency import Residency


class Holding:
    """What is held, while something is; used under the engine's lock."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._scope: Scope | None = None

    @property
    def is_on(self) -> bool:
        """Whether buckets are held now."""
        return self._scope is not None

    def begin(self) -> None:
        """Hold every bucket used from now on."""
        assert self._scope is None
        self._scope = Scope()

    def end(self) -> Scope:
        """Stop, and return the scope that holds them, for the engine to close."""
        scope, self._scope = self._scope, None
        assert scope is not None
        return scope

    def note(self, bucket: Bucket) -> bool:
        """Hold the bucket if holding is on; return False if it was held already: its use is no news."""
        if self._scope is None:
            return True
        if id(bucket) in self._scope.buckets:
            return False
        self._residency.pin(bucket)
        self._scope.buckets[id(bucket)] = bucket
        return True
