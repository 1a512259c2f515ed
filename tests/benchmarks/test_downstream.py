"""Tables of engine.reproduce as a record: every score, and the metrics of the same evaluations."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import downstream, report, tables


def filled(place: Path) -> Path:
    """As engine.reproduce leaves it: two seeds of a row that is done, one that is not."""
    scores = place / "scores" / "w2v_rlm-12"
    scores.mkdir(parents=True)
    for seed, value in enumerate((0.2, 0.4)):
        evaluation = {"score": value, "n": 7, "metrics": {"accuracy": value, "top5": 0.5, "chance": 0.1}}
        (scores / f"identification-P-1-seed{seed}.json").write_text(json.dumps(evaluation))
    cell: dict[str, Any] = {"table": 3, "row": "W2V+RLM", "task": "Id", "leads": 1, "column": "P-1-lead", "seeds_done": 2}
    cells = [cell | {"state": "done", "scores": [0.2, 0.4]}, cell | {"row": "W2V", "state": "not yet", "scores": []}]
    (place / "table-3.json").write_text(json.dumps({"protocol": "the test's", "data": {}, "cells": cells}))
    (place / "settings").mkdir()
    (place / "settings" / "identification.json").write_text(json.dumps({"train.steps": 9}))
    return place


def test_a_record_holds_what_the_cells_were_made_of(tmp_path: Path) -> None:
    out = tmp_path / "downstream.json"
    assert downstream.main([f"real={filled(tmp_path / 'tables')}", "--table", "3", "--out", str(out)]) == 0
    (part,) = report.load(out)  # complete
    assert list(part["results"]) == ["real: W2V+RLM, Id, P-1-lead"]
    result = part["results"]["real: W2V+RLM, Id, P-1-lead"]
    assert result["score"]["each"] == [0.2, 0.4] and result["score"]["mean"] == pytest.approx(0.3)
    assert result["metrics"]["top5"] == {"mean": 0.5, "interval": 0.0} and result["n"] == 7
    assert part["input"]["archives"]["real"][0]["runs"] == {"identification": {"train.steps": 9}}


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    place = filled(tmp_path / "tables")
    table = json.loads((place / "table-3.json").read_text())
    table["cells"][0] |= {"scores": [0.2], "seeds_done": 1}  # of the two that were evaluated
    (place / "table-3.json").write_text(json.dumps(table))
    downstream.main([f"real={place}", "--table", "3", "--out", str(tmp_path / "one.json")])
    (part,) = report.load(tmp_path / "one.json")
    (result,) = part["results"].values()
    assert result["score"]["interval"] is None and result["metrics"]["accuracy"] == {"mean": 0.2, "interval": None}
    part["git"]["dirty"] = True
    assert (
        f"{part['hardware']['cpu']}, {part['hardware']['cores']} cores shared with others, uncommitted changes, 20"
        in tables.note(part)
    )
    assert "| 0.200 |" in "\n".join(tables.downstream(part)) and "one seed" in tables.note(part)


def test_a_place_without_the_table_or_with_none_of_its_cells_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        downstream.main([f"real={tmp_path}"])
    assert ended.value.code == 2 and "no table-1.json" in capsys.readouterr().err
    place = filled(tmp_path / "tables")
    table = json.loads((place / "table-3.json").read_text())
    (place / "table-3.json").write_text(json.dumps(table | {"cells": table["cells"][1:]}))
    with pytest.raises(SystemExit) as ended:
        downstream.main([f"real={place}", "--table", "3", "--out", str(tmp_path / "none.json")])
    assert ended.value.code == 2 and "no cell of table 3 is done" in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()
