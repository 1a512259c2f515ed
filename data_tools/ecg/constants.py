"""Constants that hold for every ECG of a dataset: its leads, the size of crops, flags, and classes of
diagnoses."""

LEADS = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
FS_HZ = 500
CROP, HALF = 5000, 2500  # samples of a crop (10 s) and of half a crop (5 s)
CROP_SHAPE = (len(LEADS), CROP)
CROP_BYTES = 2 * len(LEADS) * CROP  # a sample is an int16

# The file formats of hospitals. The `source` of such a record is the name of its format
VENDORS = ("muse-xml", "dicom", "philips-xml", "cardiosoft-xml", "hl7-aecg", "scp-ecg", "edf")

# Words, in lower case, that tables have in cells without a value. Some of them may also be meant as
# the name of a class
_MAYBE_MISSING = """
na n/a n.a. #na #n/a <na> nan -nan nat null none nil unknown missing ? - .
"""
MAYBE_MISSING = frozenset(_MAYBE_MISSING.split())

# Prefix of the name of a synthetic database, so that nothing made from it can pass for the real one
SYNTHETIC = "synthetic-"

# The licence of each archive that anybody can download. The names of its records are no secret
PUBLIC_LICENCES = {
    "chapman_shaoxing": "CC-BY-4.0",
    "code15": "CC-BY-4.0",
    "cpsc_2018": "CC-BY-4.0",
    "cpsc_2018_extra": "CC-BY-4.0",
    "georgia": "CC-BY-4.0",
    "mimic-iv-ecg": "ODbL-1.0",
    "ningbo": "CC-BY-4.0",
    "physionet2011": "ODC-By-1.0",
    "ptb": "CC-BY-4.0",
    "ptb-xl": "CC-BY-4.0",
    "st_petersburg_incart": "CC-BY-4.0",
}
# The public archives whose own files have patient ids. Patient ids of other archives come from a
# table that the user gives
PUBLIC_PATIENTS = ("code15", "mimic-iv-ecg", "ptb-xl")

# The flag of all crops of a record with an implausible amplitude
IMPLAUSIBLE = "implausible"
# All flags of crops, explained in data_tools.ecg.crops. `flat` stands for the flags flat:I, flat:II, ...
CROP_FLAGS = ("flat", "saturated", "large", "zeros", "einthoven", IMPLAUSIBLE)

# The 26 scored diagnoses of the PhysioNet/CinC Challenge 2021, in the order of its weights.csv:
# the abbreviation of each, and the SNOMED CT codes that are scored as this diagnosis
_CLASSES = """
AF 164889003, AFL 164890007, BBB 6374002, Brady 426627000, LBBB 733534002 164909002,
RBBB 713427006 59118001, IAVB 270492004, IRBBB 713426002, LAD 39732003, LAnFB 445118002,
LPR 164947007, LQRSV 251146004, LQT 111975006, NSIVCB 698252002, NSR 426783006,
PAC 284470004 63593006, PR 10370003, PRWP 365413008, PVC 427172004 17338001, QAb 164917005,
RAD 47665007, SA 427393009, SB 426177001, STach 427084000, TAb 164934002, TInv 59931005
"""
SCORED_CLASSES = tuple(
    (name, tuple(codes)) for name, *codes in (line.split() for line in _CLASSES.split(","))
)
CLASS_ABBREVIATIONS = tuple(name for name, _ in SCORED_CLASSES)
