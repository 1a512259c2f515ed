"""A loader's state as a checkpoint holds it, and whether it belongs to the run that asks.

{"crops_seen": 512, "recipe": {...}, "dali": None}     # recipe: all that the next batch depends on besides, in words
step = resumed_step(state, recipe, batch_crops)        # or a LoaderError that names what differs
"""

from typing import Any

State = dict[str, Any]


class LoaderError(Exception):
    """Settings that cannot be, or a state of another run: one line that names what differs."""


def resumed_step(state: State, recipe: dict[str, Any], batch_crops: int) -> int:
    then, seen, dali = state.get("recipe"), state.get("crops_seen"), state.get("dali", 0)
    if not isinstance(then, dict):
        raise LoaderError("cannot go on: the loader's state has no recipe: begin a new run")
    for name in sorted(recipe.keys() | then.keys()):
        before, now = then.get(name), recipe.get(name)
        while isinstance(before, dict) and isinstance(now, dict) and before != now:  # what in it differs
            part = next(key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key))
            name, before, now = f"{name}.{part}", before.get(part), now.get(part)
        if before != now:
            raise LoaderError(f"cannot go on: {name} was {str(before)[:200]} and is {now}: set it back, or begin a new run")
    if type(seen) is not int or not 0 <= seen < 2**63 or seen % batch_crops:
        raise LoaderError(f"cannot go on: crops_seen={str(seen)[:40]} is no whole number of batches: begin a new run")
    if dali is not None and not (isinstance(dali, str) and dali):
        raise LoaderError(f"cannot go on: dali={str(dali)[:40]!r} is no state of DALI's generator: begin a new run")
    return seen // batch_crops
