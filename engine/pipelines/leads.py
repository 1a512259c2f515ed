"""Which of the twelve leads a model sees, and how a subset is written: "12", "6", "3", "2", "1" or "I,II,V2".

    parse("3") -> (0, 1, 7)      describe((0, 1, 7)) -> "I,II,V2"

A signal always holds the twelve leads in the order of LEADS until the last step of the augmentation. There, a subset either
zeroes the others (padded: the paper's "P-N leads", and any model can take it) or drops them (a model of N channels).
"""

from collections.abc import Iterable

# Written again rather than imported: who trains needs nothing of the data tools' records. A test holds the two together.
LEADS = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
LIMB, ALL = tuple(range(6)), tuple(range(12))
SUBSETS = {"12": ALL, "6": LIMB, "3": (0, 1, 7), "2": (0, 1), "1": (0,)}  # Oh et al. 2022, section 4
_INDEX = {lead.upper(): i for i, lead in enumerate(LEADS)}


class ConfigError(Exception):
    """A setting that cannot be: one line that names the key, the value seen and what to write instead."""


def in_order(leads: str | int | Iterable[str], key: str = "leads") -> tuple[int, ...]:
    """Indices into LEADS, in the order in which they are named."""
    mend = f'use {", ".join(SUBSETS)}, or names out of {" ".join(LEADS)} such as "I,II,V2"'
    text = str(leads) if isinstance(leads, str | int) else ",".join(map(str, leads))
    if text.strip() in SUBSETS:
        return SUBSETS[text.strip()]
    names = [name.strip().upper() for name in text.split(",")]
    unknown = [name for name in names if name not in _INDEX]
    if unknown:
        raise ConfigError(f"{key}={text!r}: no lead is called {unknown[0]!r}: {mend}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}={text!r}: a lead is named twice: {mend}")
    return tuple(_INDEX[name] for name in names)


def parse(leads: str | int | Iterable[str], key: str = "leads") -> tuple[int, ...]:
    """The same, ascending: a model sees leads in their one canonical order, however they were asked for."""
    return tuple(sorted(in_order(leads, key)))


def describe(leads: Iterable[int]) -> str:
    """The inverse of `parse`, by names."""
    return ",".join(LEADS[i] for i in leads)
