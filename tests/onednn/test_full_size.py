"""The script that runs graph files at their own sizes: its output, and its limits."""

from __future__ import annotations

from pathlib import Path

from onednn_files import needs_files
from onednn_full_size import HEAD, Result, run_apart, write_table

SMALL = "op/f32/clamp.json"


@needs_files
def test_file_runs_in_its_own_process() -> None:
    result = run_apart(SMALL, most_gigabytes=4, most_seconds=600)
    assert result.said == "agrees" and result.elements > 0 and 0 < result.gigabytes < 4


@needs_files
def test_process_beyond_its_limits_is_killed() -> None:
    assert run_apart(SMALL, most_gigabytes=0.001, most_seconds=600).said == "not run: more than 0.001 GB"
    assert run_apart(SMALL, most_gigabytes=4, most_seconds=0.01).said == "not run: more than 0.01 s"


def test_results_table_keeps_earlier_rows_sorted_by_size(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    write_table(path, [Result("b", 2_000_000, "agrees", 1.0, 0.1), Result("a", 1_000_000, "WRONG: x", 1.0, 0.1)])
    write_table(path, [Result("a", 1_000_000, "agrees", 3.0, 0.2)])
    assert path.read_text() == HEAD + "| a | 1.0 | agrees | 3 | 0.2 |\n| b | 2.0 | agrees | 1 | 0.1 |\n"
