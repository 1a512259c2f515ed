"""From `Dx:` to codes and the 26 classes."""

import pytest

from omnilead.data_tools.ecg.record import (
    CLASS_ABBREVIATIONS,
    SCORED_CLASSES,
    class_row,
    parse_dx,
    snomed_codes_and_word_count,
)


def test_each_code_belongs_to_exactly_one_class():
    assert len(SCORED_CLASSES) == len(class_row(())) == 26 and not any(
        class_row(("164931005", "1"))
    )
    for index, (_, codes) in enumerate(SCORED_CLASSES):
        for code in codes:
            assert [i for i, holds in enumerate(class_row(("9", code))) if holds] == [index]
    both = class_row(("59118001", "713427006", "426783006"))  # two names of one class, and another
    assert [CLASS_ABBREVIATIONS[i] for i, holds in enumerate(both) if holds] == ["RBBB", "NSR"]


@pytest.mark.parametrize(
    ("text", "codes", "dropped"),
    [
        ("426783006, 164889003,426783006", ("426783006", "164889003"), 0),
        ("1" * 18 + "," + "2" * 19, ("1" * 18,), 1),  # SNOMED's longest has 18 digits
        ("AF,atrial fibrillation,,-5", ("164889003",), 2),
        ("٣٤٥", (), 1),
        ("", (), 0),
    ],
)
def test_free_text_diagnoses_are_counted_and_not_copied(text, codes, dropped):
    assert snomed_codes_and_word_count(parse_dx(text)) == (codes, dropped)
