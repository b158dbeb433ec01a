"""Which blocks of a streamed model stay on the target."""

from __future__ import annotations

from collections.abc import Sequence


def choose_residents(sizes: Sequence[int], capacity_bytes: int) -> set[int]:
    """Return the indices of the blocks that stay, so that the streamed ones lie evenly between them.

    Evenly, because a streamed block's copy is hidden behind what computes before it: two streamed
    blocks in a row would wait where one between residents does not.

    Args:
        sizes: Bytes of each block, in the order in which they run.
        capacity_bytes: Most that the resident ones may take together.
    """
    total = sum(sizes)
    if total <= capacity_bytes:
        return set(range(len(sizes)))
    if capacity_bytes <= 0:
        return set()
    streamed_share = (total - capacity_bytes) / total
    residents: list[int] = []
    debt = 0.0
    for index, size in enumerate(sizes):
        debt += streamed_share * size
        if debt >= 0.5 * size:
            debt -= size
        else:
            residents.append(index)
    used = sum(sizes[index] for index in residents)
    while used > capacity_bytes:
        used -= sizes[residents.pop(len(residents) // 2)]
    chosen = set(residents)
    for index, size in enumerate(sizes):
        if index not in chosen and used + size <= capacity_bytes:
            chosen.add(index)
            used += size
    return chosen
