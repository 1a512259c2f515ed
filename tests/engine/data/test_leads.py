"""Lead subsets: what "12", "3" and "I,II,V2" mean, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import ALL_LEADS, LEAD_SUBSETS, describe_leads, parse_leads


def test_the_papers_five_subsets():
    for name, leads in {"6": "I,II,III,aVR,aVL,aVF", "3": "I,II,V2", "2": "I,II", "1": "I"}.items():
        assert describe_leads(parse_leads(name)) == leads
    assert parse_leads("12") == parse_leads(12) == ALL_LEADS
    assert [len(parse_leads(name)) for name in LEAD_SUBSETS] == [int(name) for name in LEAD_SUBSETS]


def test_names_in_any_case_and_order_give_the_canonical_order():
    for leads in ("v2, ii ,I", ["I", "II", "V2"], ("V2", "I", "II")):
        assert parse_leads(leads) == parse_leads("3")


@given(st.sets(st.integers(0, 11), min_size=1))
def test_describe_leads_is_the_inverse_of_parse_leads(leads):
    assert parse_leads(describe_leads(sorted(leads))) == tuple(sorted(leads))


@pytest.mark.parametrize("text", ["", "7", "I,,II", "I,X", "I,I", "I II", "13", "V0"])
def test_invalid_leads_are_refused_in_one_line(text):
    says = r"\Aaugment\.leads=.*use 12, 6, 3, 2, 1, or names out of I II III.*\Z"
    with pytest.raises(ConfigError, match=says):
        parse_leads(text, "augment.leads")
