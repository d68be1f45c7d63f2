"""Which way an emitted program sends tokens to experts and back: `Cluster.exchange` prices the forms and takes one.

    apart     each copy of a token on its own, one all_to_all over the whole group
    together  one copy a destination domain, hop by hop from the outermost tier to the ranks (`lower/exchange.py`)
    relayed   each copy on its own, hop by hop; never quicker than apart, and refused: the outermost tier carries the
              same bytes, every tier inside carries all copies instead of those that stay, and latencies add up

Unlike kernels that forward while they receive (`dispatch.py`), hops of an emitted program run one after another. With
the four moves of tokens (dispatch, combine, both again for gradients) go five calls a hop that are all latency: counts
and lists of experts, weights forward and backward, gradients of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpsearch.cluster.dispatch import Routing, parts_of, steps
from hpsearch.cluster.route import Links, Price
from hpsearch.cluster.tier import GroupShape
from hpsearch.errors import LegalityError

CALLS = 9 / 4
"""Calls for each move of tokens: see above; a test counts them."""
FORMS = {
    "apart": "each copy on its own",
    "together": "one copy a domain",
    "relayed": "each copy on its own, hop by hop",
}


@dataclass(frozen=True)
class Exchange:
    """One form of one axis, with the price of one move of the tokens of a rank, one way."""

    form: str
    hops: tuple[int, ...]
    """Sizes of the groups of each hop, from the outermost; (): one exchange over the whole group."""
    price: Price
    crossing: float
    """Copies of a token that leave its domain of the outermost tier, on average."""

    def __str__(self) -> str:
        levels = f" in hops of {' x '.join(map(str, self.hops))}" if self.hops else ""
        return f"{FORMS[self.form]}{levels}"


def exchanges(links: Links, routing: Routing, shape: GroupShape) -> tuple[Exchange, ...]:
    """Every form, priced, the cheapest first; of equals the first of FORMS."""
    found = [_exchange(links, routing, shape, form) for form in FORMS]
    return tuple(sorted(found, key=lambda each: each.price.seconds))


def choose(found: tuple[Exchange, ...], form: str | None) -> Exchange:
    """The cheapest, or the one that is asked for by name. LegalityError: a name that is none, or `relayed`."""
    by_name = {each.form: each for each in found}
    if form is None:
        return next(each for each in found if each.form != "relayed")
    if form not in by_name:
        raise LegalityError(f"exchange {form!r}", "expected apart or together", "Leave it out to take the cheaper one.")
    if form == "relayed":
        asked, apart = by_name["relayed"].price.seconds, by_name["apart"].price.seconds
        raise LegalityError(
            f"exchange relayed ({FORMS[form]})",
            f"expected a form that saves bytes, but it takes {asked:.4g} s where apart takes {apart:.4g} s",
            "Use together, which sends one copy a domain, or apart.",
        )
    return by_name[form]


def _exchange(links: Links, routing: Routing, shape: GroupShape, form: str) -> Exchange:
    busy, sizes, copies = [], [], 0.0
    for tier, parts, members in steps(shape):
        inside = shape.size // parts
        met = parts_of(routing, parts, shape) if form == "together" else float(routing.top_k)
        copies = met * (members - inside) / (shape.size if form == "apart" else members)
        busy.append(routing.tokens * routing.token_bytes * copies / links.tiers[tier].rate_within(members))
        sizes.append(members // inside)
    latencies = [links.launch_s + links.tiers[tier].latency_s for tier, _, _ in steps(shape)]
    apart = form == "apart"
    seconds = CALLS * latencies[-1] + max(busy) if apart else CALLS * sum(latencies) + sum(busy)
    words = f"exchange {links.tiers[shape.outermost].name} x{shape.size} ({FORMS[form]})"
    hops = () if apart else tuple(reversed(sizes))
    return Exchange(form, hops, Price(seconds, "modelled", words), copies)
