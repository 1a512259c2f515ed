"""A command's options, as its function's parameters declare them."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import pytest

from omnilead.data_tools.io.errors import DataError
from omnilead.data_tools.io.options import Option, add_options, check_values
from omnilead.data_tools.io.terminal import Parser
from tests.tables import tabulated


def cut(
    files: Annotated[Sequence[str] | str, Option("what is cut", "FILE")],
    at: Annotated[float, Option("where", "S", "--at", low=0)] = 5,
    *,
    out: Annotated[str | None, Option("write it", required=True)] = None,
    parts: Annotated[int | None, Option("how many", low=1, high=9)] = None,
    end_mode: Annotated[Literal["drop", "pad"], Option("the rest")] = "drop",
    names: Annotated[Sequence[str], Option("of the parts")] = (),
    fast: Annotated[bool, Option("no checks")] = False,
    band: Annotated[tuple[float, float] | None, Option("from, to in Hz")] = None,
    rename: Annotated[Sequence[tuple[str, str]] | None, Option("names", ("OLD", "NEW"))] = None,
    hidden: int = 0,
) -> None: ...


def parsed(words):
    parser = Parser("cut")
    add_options(parser, cut)
    return vars(parser.parse_args(words.split()))


def test_parameters_make_the_parser():
    defaults = {
        "at": 5, "parts": None, "end_mode": "drop", "names": (), "fast": False,
        "band": None, "rename": None,
    }  # fmt: skip
    assert parsed("a b --out o") == {"files": ["a", "b"], "out": "o", **defaults}
    words = "a --out o --at 0 --parts 9 --end-mode pad --names x y --fast"
    assert parsed(words) == {
        "files": ["a"], "out": "o", "at": 0.0, "parts": 9, "end_mode": "pad", "names": ["x", "y"],
        "fast": True, "band": None, "rename": None,
    }  # fmt: skip
    words = "a --out o --band 1 40.5 --rename a b --rename c d"
    given = {"band": [1.0, 40.5], "rename": [["a", "b"], ["c", "d"]]}
    assert parsed(words) == {"files": ["a"], "out": "o", **defaults, **given}


@pytest.mark.parametrize(
    ("words", "says"),
    tabulated("""
a                       | the following arguments are required: --out
--out o                 | the following arguments are required: FILE
a --out o --parts 10    | argument --parts: 10: must be a whole number from 1 to 9
a --out o --parts 1.0   | argument --parts: '1.0': must be a whole number from 1 to 9
a --out o --band 1      | argument --band: expected 2 arguments
a --out o --band 1 x    | argument --band: 'x': must be a number
a --out o --at nan      | argument --at: nan: must be a number of at least 0
a --out o --end-mode pd | argument --end-mode: invalid choice: 'pd': did you mean pad?
a --out o --hidden 1    | unrecognized arguments: --hidden 1
"""),
)
def test_a_wrong_argument_is_one_line(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"cut: {says} (--help shows all)\n"


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (("a", -1), {}, "argument --at: -1: must be a number of at least 0"),
        (("a",), {"parts": "3"}, "argument --parts: '3': must be a whole number from 1 to 9"),
        (("a",), {"parts": 2.5}, "argument --parts: 2.5: must be a whole number from 1 to 9"),
        (("a",), {"end_mode": "x"}, "argument --end-mode: invalid choice: 'x' (choose from drop, pad)"),
        (("a",), {"end_mode": None}, "argument --end-mode: invalid choice: None (choose from drop, pad)"),
    ],
)  # fmt: skip
def test_a_wrong_value_in_python_is_the_same_line(args, kwargs, says):
    with pytest.raises(DataError) as error:
        check_values(cut, args, kwargs)
    assert str(error.value) == says


def test_values_of_other_types_pass_in_python():
    given = {"parts": np.int64(3), "names": np.array(["x"]), "hidden": -1, "nothing": 1}
    check_values(cut, ("a", np.float32(1)), given)
    check_values(cut, (["a"], 2), {"parts": None, "band": (1, 40)})
