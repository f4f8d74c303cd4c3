"""specs/ops contains one page for each kind, generated from its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from opgraph.ir.opdef import OpDef, all_ops
from opgraph.ops.page import index_text, page_text, write_pages

FOLDER = Path(__file__).parents[2] / "specs" / "ops"
REWRITE = "rewrite the pages: python -m opgraph.ops.page specs/ops"


@pytest.mark.parametrize("record", all_ops(), ids=lambda r: r.kind)
def test_page_equals_the_text_generated_from_its_record(record: OpDef) -> None:
    path = FOLDER / f"{record.kind}.md"
    assert path.exists(), REWRITE
    assert path.read_text(encoding="utf-8") == page_text(record), REWRITE


def test_index_lists_every_page_and_no_others_exist() -> None:
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == index_text(), REWRITE
    assert {p.stem for p in FOLDER.glob("*.md")} == {"README", *(r.kind for r in all_ops())}, REWRITE


def test_writing_replaces_old_pages_and_removes_stale_ones(tmp_path: Path) -> None:
    (tmp_path / "Gone.md").write_text("gone")
    (tmp_path / "Exp.md").write_text("old")
    written = write_pages(tmp_path)
    assert sorted(tmp_path.glob("*.md")) == written
    assert (tmp_path / "Exp.md").read_text().startswith("# Exp\n")
    assert not (tmp_path / "Gone.md").exists()


@pytest.mark.parametrize("record", [r for r in all_ops() if r.is_pointwise], ids=lambda r: r.kind)
def test_a_page_names_every_port_attribute_and_onnx_op(record: OpDef) -> None:
    text = page_text(record)
    for name in [p.name for p in (*record.inputs, *record.outputs)] + [a.name for a in record.attrs]:
        assert f"`{name}`" in text
    for form in record.onnx if isinstance(record.onnx, tuple) else ():
        assert f"`{form.op_type}`, " in text
