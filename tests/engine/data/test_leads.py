"""Lead subsets: what "12", "3" and "I,II,V2" mean, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnilead.data_tools.record import LEADS as RECORD_LEADS
from omnilead.engine.common import ALL, LEADS, SUBSETS, ConfigError, describe_leads, parse_leads


def test_engine_and_data_tools_use_the_same_leads() -> None:
    assert LEADS == RECORD_LEADS


def test_the_papers_five_subsets() -> None:
    assert [describe_leads(parse_leads(name)) for name in ("6", "3", "2", "1")] == [
        "I,II,III,aVR,aVL,aVF",
        "I,II,V2",
        "I,II",
        "I",
    ]
    assert parse_leads("12") == parse_leads(12) == ALL
    assert [len(parse_leads(name)) for name in SUBSETS] == [int(name) for name in SUBSETS]


def test_names_in_any_case_and_order_give_the_canonical_order() -> None:
    assert (
        parse_leads("v2, ii ,I")
        == parse_leads(["I", "II", "V2"])
        == parse_leads(("V2", "I", "II"))
        == parse_leads("3")
    )


@given(st.sets(st.integers(0, 11), min_size=1))
def test_describe_leads_is_the_inverse_of_parse_leads(leads: set[int]) -> None:
    assert parse_leads(describe_leads(sorted(leads))) == tuple(sorted(leads))


@pytest.mark.parametrize("text", ["", "7", "I,,II", "I,X", "I,I", "I II", "13", "V0"])
def test_invalid_leads_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"augment\.leads=") as error:
        parse_leads(text, "augment.leads")
    assert "use 12, 6, 3, 2, 1, or names out of I II III" in str(error.value) and "\n" not in str(
        error.value
    )
