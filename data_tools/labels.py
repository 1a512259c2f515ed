"""The 26 scored diagnoses of the PhysioNet/CinC Challenge 2021, in the order of its weights.csv; the text of `Dx:`."""

from collections.abc import Iterable

# (abbreviation, SNOMED CT codes that are scored as the same diagnosis)
CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("AF", ("164889003",)),
    ("AFL", ("164890007",)),
    ("BBB", ("6374002",)),
    ("Brady", ("426627000",)),
    ("LBBB", ("733534002", "164909002")),
    ("RBBB", ("713427006", "59118001")),
    ("IAVB", ("270492004",)),
    ("IRBBB", ("713426002",)),
    ("LAD", ("39732003",)),
    ("LAnFB", ("445118002",)),
    ("LPR", ("164947007",)),
    ("LQRSV", ("251146004",)),
    ("LQT", ("111975006",)),
    ("NSIVCB", ("698252002",)),
    ("NSR", ("426783006",)),
    ("PAC", ("284470004", "63593006")),
    ("PR", ("10370003",)),
    ("PRWP", ("365413008",)),
    ("PVC", ("427172004", "17338001")),
    ("QAb", ("164917005",)),
    ("RAD", ("47665007",)),
    ("SA", ("427393009",)),
    ("SB", ("426177001",)),
    ("STach", ("427084000",)),
    ("TAb", ("164934002",)),
    ("TInv", ("59931005",)),
)
ABBREVIATIONS = tuple(name for name, _ in CLASSES)
CLASS_OF = {code: i for i, (_, codes) in enumerate(CLASSES) for code in codes}

# The nine words of CPSC 2018's first release, in which `Dx:` held text, and the codes of the same records today.
CPSC_WORDS = {
    "Normal": "426783006",
    "AF": "164889003",
    "I-AVB": "270492004",
    "LBBB": "164909002",
    "RBBB": "59118001",
    "PAC": "284470004",
    "PVC": "164884008",
    "STD": "429622005",
    "STE": "164931005",
}

# PTB-XL's SCP statements that name a scored class (NORM is a verdict, not a rhythm: it has none).
SCP_CODES = {
    "AFIB": "164889003",
    "AFLT": "164890007",
    "CLBBB": "164909002",
    "CRBBB": "713427006",
    "1AVB": "270492004",
    "IRBBB": "713426002",
    "LAFB": "445118002",
    "LPR": "164947007",
    "LVOLT": "251146004",
    "LNGQT": "111975006",
    "IVCD": "698252002",
    "SR": "426783006",
    "PAC": "284470004",
    "SVARR": "63593006",
    "PACE": "10370003",
    "PVC": "164884008",  # the Challenge files PTB-XL's under ventricular ectopics, which it does not score
    "QWAVE": "164917005",
    "SARRH": "427393009",
    "SBRAD": "426177001",
    "STACH": "427084000",
    "NT_": "164934002",
    "NDT": "164934002",
    "INVT": "59931005",
}
HEART_AXIS_CODES = {"LAD": "39732003", "ALAD": "39732003", "RAD": "47665007", "ARAD": "47665007"}


def parse_dx(text: str) -> tuple[str, ...]:
    """The fields of `Dx:`, CPSC's words as codes."""
    fields = [field.strip() for field in text.split(",") if field.strip()]
    return tuple(CPSC_WORDS.get(field, field) for field in fields)


def only_codes(dx: Iterable[str]) -> tuple[tuple[str, ...], int]:
    """Distinct SNOMED codes in their order, and how many words were none: those are counted, never copied (free text)."""
    codes = [(word, word.isascii() and word.isdigit() and len(word) <= 18) for word in dx]
    return tuple(dict.fromkeys(word for word, is_code in codes if is_code)), sum(not is_code for _, is_code in codes)


def class_row(dx: tuple[str, ...]) -> list[bool]:
    """26 booleans: a class holds if any of its equivalent codes does. Unscored codes count for nothing."""
    present = {CLASS_OF.get(code) for code in dx}
    return [i in present for i in range(len(CLASSES))]
