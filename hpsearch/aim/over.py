"""Values over which an objective is asked: those that are stated, else multiples made of 2 and 3."""

from __future__ import annotations

from hpsearch.cluster.tier import Tier, node_size
from hpsearch.errors import LegalityError

FARTHEST = 64
"""Times the value given, where no others are stated."""
MOST_SHARES = 16
ALL_NODES = 32
"""Of so many nodes every number is looked at; of more, those made of 2 and 3."""


def stated(text: str) -> tuple[int, ...]:
    """The values of `8,16,32`, of `8..64` (every one) or of `8..64/8` (in steps). LegalityError: neither."""
    found: list[int] = []
    for word in text.split(","):
        first, dots, rest = word.strip().partition("..")
        last, _, step = rest.partition("/")
        parts = [first, last, step or "1"] if dots else [first]
        if not all(part.strip().isdecimal() and int(part) for part in parts):
            raise LegalityError(
                "--over",
                f"expected numbers as 8,16,32 or a range as 8..64/8, but got {text!r}",
                "Write --over 8..64/8.",
            )
        found += range(int(first), int(last) + 1, int(step or 1)) if dots else [int(first)]
    if not found:
        raise LegalityError("--over", f"expected at least one number, but {text!r} has none", "Write --over 8..64/8.")
    return tuple(sorted(set(found)))


def multiples(value: int, most: int) -> tuple[int, ...]:
    """`value` times numbers made of 2 and 3, up to `most`."""
    return tuple(value * n for n in range(1, most // value + 1) if _is_made_of_2_and_3(n))


def counts(tiers: tuple[Tier, ...], most: int) -> tuple[int, ...]:
    """Device counts up to `most`: parts of a node made of 2 and 3, and whole nodes, all of them where they are few."""
    node = node_size(tiers)
    whole = range(node, most + 1, node) if most <= ALL_NODES * node else multiples(node, most)
    return tuple(sorted({*multiples(1, min(node, most)), *whole, most}))


def shares(tiers: tuple[Tier, ...], devices: int) -> tuple[int, ...]:
    """Sizes of groups that share `devices`: whole domains of the outermost tier that has two or more of them, taken
    together where there would be more than `MOST_SHARES` sizes."""
    unit = max(size for size in (1, *(tier.size for tier in tiers[:-1])) if 2 * size <= devices or size == 1)
    units = devices // unit
    several = -(-units // MOST_SHARES)
    return tuple(sorted({unit * n for n in range(several, units + 1, several)} | {unit * units}))


def _is_made_of_2_and_3(number: int) -> bool:
    for prime in (2, 3):
        while number % prime == 0:
            number //= prime
    return number == 1
