"""Reading `act.py:Name`: something that a Python file or an importable module holds."""

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
    """What `act.py:Name` or `package.module:Name` stands for, and its name: `Outer.Inner` for what a class holds.

    The file is run, as `import` would; whoever names it trusts it. Files beside it can be imported by it.

    Raises:
        UsageError: no `:Name`, or no such name.
        ModelError: no such file or module, or it raises when it is run.
    """
    path, colon, name = target.rpartition(":")
    if not colon or not path or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError("no name in a Python file", where=target, fix="write FILE.py:Name or package.module:Name")
    module = _file(Path(path)) if path.endswith(".py") else _module(path)
    try:
        return operator.attrgetter(name)(module), name
    except AttributeError:
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        hint = f"it defines {', '.join(own[:8])}" if own else "it defines no class and no function"
        raise UsageError(f"there is no {name} in it", where=path, fix=hint) from None


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise ModelError(f"the Python file {what}", where=str(path), fix="check the path; the form is FILE.py:Name")
    name = f"opgraph_memory_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes of the file look themselves up there
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


def _failed(error: BaseException, path: str) -> ModelError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    line = getattr(error, "lineno", None) or next((f.lineno for f in reversed(frames) if f.filename == path), None)
    fix = 'make the file importable: `python -c "import ..."` shows the whole error'
    if isinstance(error, ImportError) and "relative import" in str(error):
        fix = "it belongs to a package: write package.module:Name, from the folder that holds the package"
    return ModelError(
        f"running it raised {type(error).__name__}: {error}".splitlines()[0],
        where=f"{path}:{line}" if line else path,
        fix=fix,
    )
