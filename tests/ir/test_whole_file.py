"""Text files are written completely or not at all, at any path."""

from __future__ import annotations

import importlib.util
import os
import stat
from pathlib import Path

import pytest
from disk import room_for

import opgraph as og
from opgraph.errors import ModelError
from opgraph.ir.whole_file import write_whole


def test_file_mode_is_kept_on_replacement_and_default_for_new_files(tmp_path: Path) -> None:
    (old := tmp_path / "old").write_text("old")
    old.chmod(0o640)
    (plain := tmp_path / "plain").write_text("")
    for path, mode in ((old, 0o640), (tmp_path / "new", stat.S_IMODE(plain.stat().st_mode))):
        write_whole(path, "é\n")
        assert path.read_bytes() == "é\n".encode() and stat.S_IMODE(path.stat().st_mode) == mode
    assert {p.name for p in tmp_path.iterdir()} == {"old", "plain", "new"}


@pytest.mark.parametrize("text", ["\ud800", None], ids=("no UTF-8", "interrupted"))
def test_failed_write_leaves_the_old_file(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises((ValueError, TypeError)):
        write_whole(path, text)  # type: ignore[arg-type]
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_symbolic_link_is_followed_and_kept(tmp_path: Path) -> None:
    (folder := tmp_path / "there").mkdir()
    (link := tmp_path / "a").symlink_to(folder / "b")
    for text in ("new", "newer"):
        write_whole(link, text)
        assert link.is_symlink() and (folder / "b").read_text() == text


def test_device_file_is_written_and_not_replaced(tmp_path: Path) -> None:
    """Root could otherwise rename a file over /dev/null."""
    try:
        os.mknod(device := tmp_path / "null", 0o666 | stat.S_IFCHR, os.stat(os.devnull).st_rdev)
        device.write_text("")
    except OSError:
        pytest.skip("devices are made by root, where they are allowed")
    write_whole(device, "text")
    g = og.Graph()
    g.add_op("Abs", g.input("x", shape=(4,)))
    og.onednn.dump(g, device)
    if importlib.util.find_spec("onnx") is not None:  # a model may need a second file
        with pytest.raises(ModelError, match="that is no file"):
            og.onnx.save(g, device)
    assert stat.S_ISCHR(device.stat().st_mode) and list(tmp_path.iterdir()) == [device]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(path, "text")
        assert os.read(end, 10) == b"text" and stat.S_ISFIFO(path.stat().st_mode)
    finally:
        os.close(end)


def test_full_disk_error_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    (path := tmp_path / "a").write_text("old")
    with room_for(4096), pytest.raises(OSError, match="too large") as caught:
        write_whole(path, "x" * 5000)
    assert caught.value.filename == str(path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a"]
