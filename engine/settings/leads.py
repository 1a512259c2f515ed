"""Sets of leads, given by names or by the number of leads.

parse_leads("3")                  # (0, 1, 7); also "12", "6", "2", "1" or names: "I,II,V2"
describe_leads((0, 1, 7))         # "I,II,V2"

Signals hold all twelve leads in the order of LEADS until the last step of augmentation. For a
subset of leads, that step either sets the others to zero (padded: the paper's "P-N leads", for a
model of twelve channels) or drops them (a model of N channels).
"""

from collections.abc import Iterable

from omnilead.data_tools.ecg.constants import LEADS

from .errors import ConfigError

LIMB_LEADS, ALL_LEADS = tuple(range(6)), tuple(range(12))


# the subsets of leads in Oh et al. 2022, section 4, by their number of leads
LEAD_SUBSETS = {
    "12": ALL_LEADS,
    "6": LIMB_LEADS,
    "3": (0, 1, 7),
    "2": (0, 1),
    "1": (0,),
}


_INDEX_OF_LEAD = {lead.upper(): i for i, lead in enumerate(LEADS)}


def leads_in_order(leads: str | int | Iterable[str], key: str = "leads") -> tuple[int, ...]:
    """Returns the indices of the leads in LEADS, in the order given. `key`: the setting, for
    messages."""
    mend = f'use {", ".join(LEAD_SUBSETS)}, or names out of {" ".join(LEADS)} such as "I,II,V2"'
    text = str(leads) if isinstance(leads, str | int) else ",".join(map(str, leads))
    if text.strip() in LEAD_SUBSETS:
        return LEAD_SUBSETS[text.strip()]
    names = [name.strip().upper() for name in text.split(",")]
    unknown = [name for name in names if name not in _INDEX_OF_LEAD]
    if unknown:
        raise ConfigError(f"{key}={text!r}: no lead is called {unknown[0]!r}: {mend}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}={text!r}: a lead is named twice: {mend}")
    return tuple(_INDEX_OF_LEAD[name] for name in names)


def parse_leads(leads: str | int | Iterable[str], key: str = "leads") -> tuple[int, ...]:
    """Returns the indices of the leads in LEADS, ascending. A model takes its leads in the order
    of LEADS, whatever order is given."""
    return tuple(sorted(leads_in_order(leads, key)))


def describe_leads(leads: Iterable[int]) -> str:
    """Returns the names of leads, joined by commas, as `parse_leads` reads them."""
    return ",".join(LEADS[i] for i in leads)
