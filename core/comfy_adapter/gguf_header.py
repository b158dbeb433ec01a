"""What is checked of a GGUF file's header before the package ``gguf`` reads it.

That reader trusts the counts: an array of 2**60 numbers that the file does not hold is an endless loop
there. What does hold is left to it.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
from pathlib import Path

_MAGIC = b"GGUF"
_MAX_TENSORS = 2**17
_MAX_FIELDS = 2**16
# Elements of all arrays together; vocabularies of language models have some hundred thousand.
_MAX_ITEMS = 2**22
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def check_header(path: Path) -> None:
    """Walk through a file's metadata.

    Raises:
        ValueError: If it is not whole, or counts more than any model has.
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        walk = _Walk(data)
        if walk.take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = walk.number(4)
        if version not in (2, 3):
            raise ValueError(f"its version is {version} or its byte order another; 2 and 3 are read")
        num_tensors, num_fields = walk.number(8), walk.number(8)
        if num_tensors > _MAX_TENSORS or num_fields > _MAX_FIELDS:
            raise ValueError(f"it counts {num_tensors} tensors and {num_fields} fields")
        for _ in range(num_fields):
            walk.skip(walk.number(8))
            walk.skip_value(walk.number(4))


class _Walk:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._num_items = 0

    def take(self, nbytes: int) -> bytes:
        begin = self._at
        self.skip(nbytes)
        return self._data[begin : self._at]

    def skip(self, nbytes: int) -> None:
        if nbytes > len(self._data) - self._at:
            raise ValueError("its header goes on after its end")
        self._at += nbytes

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def skip_value(self, kind: int) -> None:
        if kind != _ARRAY:
            self._skip_item(kind)
            return
        item_kind, count = self.number(4), self.number(8)
        self._num_items += count
        if self._num_items > _MAX_ITEMS:
            raise ValueError(f"its metadata has arrays of {self._num_items} elements")
        for _ in range(count):
            self._skip_item(item_kind)

    def _skip_item(self, kind: int) -> None:
        if kind == _STRING:
            self.skip(self.number(8))
        elif kind in _SCALAR_BYTES:
            self.skip(_SCALAR_BYTES[kind])
        else:
            raise ValueError(f"its metadata has a value of kind {kind}")
