"""Loads `act.py:Name`: an object in a Python file or an importable module."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import sys
import traceback
from pathlib import Path
from types import ModuleType

from opgraph.cli.main import UsageError
from opgraph.errors import ModelError


def named_thing(target: str) -> tuple[object, str]:
    """The object of `act.py:Name` or `package.module:Name`, and its name: `Outer.Inner` for a member of a class.

    The file is run, as `import` would, so the user must trust it. It can import the files next to it.

    Raises:
        UsageError: no `:Name`, or no such name.
        ModelError: no such file or module, or it raises when it is run.
    """
    path, name = place_and_name(target)
    module = _file(Path(path)) if path.endswith(".py") else _module(path)
    try:
        return operator.attrgetter(name)(module), name
    except AttributeError:
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        hint = f"it defines {', '.join(own[:8])}" if own else "it defines no class and no function"
        raise UsageError(f"there is no {name} in it", where=path, fix=hint) from None


def place_and_name(target: str) -> tuple[str, str]:
    """The file or module of `act.py:Name` or `package.module:Name`, and the name; nothing is run.

    Raises:
        UsageError: no `:Name`.
        ModelError: no such file.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError("no name in a Python file", where=target, fix="write FILE.py:Name or package.module:Name")
    path = Path(place)
    if place.endswith(".py") and not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise ModelError(f"the Python file {what}", where=place, fix="check the path; the form is FILE.py:Name")
    return place, name


def _file(path: Path) -> ModuleType:
    name = f"opgraph_memory_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes of the file are looked up there
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _failed(error, str(path)) from error
    return module


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"there is no module {error.name}", where=name, fix="write FILE.py:Name for a file, or install the module"
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed(error, name) from error


def _is_same(path: str, other: str) -> bool:
    return Path(path).absolute() == Path(other).absolute()


def _failed(error: BaseException, path: str) -> ModelError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    line = getattr(error, "lineno", None) or next(
        (f.lineno for f in reversed(frames) if _is_same(f.filename, path)), None
    )
    fix = (
        f"`python {path}` shows the whole error"
        if path.endswith(".py")
        else "import it in Python to see the whole error"
    )
    if isinstance(error, ImportError) and "relative import" in str(error):
        fix = "it belongs to a package: write package.module:Name, from the folder that holds the package"
    return ModelError(
        f"running it raised {type(error).__name__}: {error}".splitlines()[0],
        where=f"{path}:{line}" if line else path,
        fix=fix,
    )
