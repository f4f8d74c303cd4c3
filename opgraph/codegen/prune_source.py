"""Prunes a skeleton's text to the part that one kernel needs: a compiler takes 30 to 150 ms to read all of `kernels/`.

Only names count: a declaration stays if its name occurs, in any meaning, in the kernel or in a declaration that stays.
This is conservative: unused declarations may stay, needed ones never go. An operator stays if the type of its first
operand stays. Lines without a name (preprocessor lines) always stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from opgraph.codegen.sources import spliced

#: Conditions with a fixed value in kernels for a GPU (also if a CPU stands in for it), and in all other kernels.
_ON_GPU = (
    ("#if OG_LANES", False),
    ("#if OG_TABLES", False),
    ("#if OG_GPU_FORMS", True),
    ("#if !OG_DEVICE && !defined(OG_NO_", False),
    ("#if OG_DEVICE || defined(OG_NO_", True),
)
_ON_HOST = (("#if OG_DEVICE\n", False), ("#if !OG_DEVICE\n", True))
_ATTRIBUTE = re.compile(r"alignas\([^;{]*?\)\s+(?=\w)|__attribute__\(\(.*?\)\)+\s*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_FRAME = re.compile(r"(?:namespace \w+ \{|#if\w* .*)$")
_GENERATED = re.compile(r"[A-Z_]+\((\w+)\)$")  # by a macro, for the name in it
_END = re.compile(r"\}  // namespace \w+$|#endif")
_OVER = re.compile(r"[;}]\s*(?://.*)?$")
_TYPE = re.compile(r"(?:struct|class|union)\s+(\w+)")
_USING = re.compile(r"using\s+(?:[\w:]*::)?(\w+)\s*[=;]")
_ENUM = re.compile(r"enum\b(?=[^{]*\{)")
_FUNCTION = re.compile(r"([A-Za-z_]\w*)(?:<[^()]*>)?\(")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])*\s*(?:=|;|\{)")


@dataclass(frozen=True, slots=True)
class Part:
    """Some lines of a text.

    Attributes:
        text: the lines.
        frame: 1 if they begin a namespace or a condition, -1 if they end one, else 0.
        names: the names that they declare; empty: they always stay.
    """

    text: str
    frame: int
    names: tuple[str, ...]


def needed(skeleton: str, kernel: str) -> str:
    """The text of a source in `kernels/` and of its includes, without the parts that the kernel does not need."""
    parts = _parts(skeleton)
    by_name = _by_name(skeleton)
    kept = {i for i, part in enumerate(parts) if not part.names}
    names = set(_WORD.findall(kernel))
    for i in kept:
        names |= _words(parts[i].text)
    pending = list(names)
    while pending:
        for i in by_name.get(pending.pop(), ()):
            if i not in kept:
                kept.add(i)
                more = _words(parts[i].text) - names
                names |= more
                pending += more
    return "\n".join(_without_empty_frames([parts[i] for i in sorted(kept)]))


def _without_empty_frames(parts: list[Part]) -> list[str]:
    """The texts of the parts, without empty namespaces and conditions."""
    lines: list[str] = []
    begun: list[int] = []  # first lines of the frames that are empty so far
    for part in parts:
        if part.frame < 0 and begun:
            del lines[begun.pop() :]
            continue
        if part.frame > 0:
            begun.append(len(lines))
        elif part.frame == 0 and part.text != "#else":
            begun.clear()
        lines.append(part.text)
    return lines


@cache
def _parts(skeleton: str) -> tuple[Part, ...]:
    parts: list[Part] = []
    lines: list[str] = []
    depth = 0
    outside: list[int] = []  # for each condition inside a declaration: the depth where it began
    for line in _settled(spliced(skeleton).split("\n"), _ON_GPU if skeleton.endswith(".cuh") else _ON_HOST):
        if not lines and not line:
            continue
        if not lines and (_FRAME.match(line) or _END.match(line)):
            parts.append(Part(line, 1 if _FRAME.match(line) else -1, ()))
            continue
        lines.append(line)
        if lines[0].startswith("#"):
            over = not line.endswith("\\")
        elif line.startswith("#"):
            over = False
            if line.startswith("#if"):
                outside.append(depth)
            elif line.startswith("#e"):  # both sides begin at the same depth
                depth = outside[-1]
                del outside[len(outside) - line.startswith("#endif") :]
        else:
            depth += line.count("{") - line.count("}")
            over = depth == 0 and (_OVER.search(line) or _GENERATED.match(line)) is not None
        if over:
            text = "\n".join(lines)
            parts.append(Part(text, 0, _declared(text)))
            lines.clear()
    return tuple(parts)


def _settled(lines: Iterable[str], conditions: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """The lines without those that no kernel of this kind uses."""
    kept: list[bool | None] = []  # for each open condition: true if its lines stay; None: not settled
    for line in lines:
        if line.startswith("#if"):
            kept.append(next((value for start, value in conditions if f"{line}\n".startswith(start)), None))
            if kept[-1] is not None:
                continue
        elif line == "#else" and (now := kept[-1]) is not None:
            kept[-1] = not now
            continue
        elif line == "#endif" and kept.pop() is not None:
            continue
        if False not in kept:
            yield line


def _declared(text: str) -> tuple[str, ...]:
    """The names that a text declares."""
    if text.startswith("#"):
        return ()
    if found := _GENERATED.match(text):
        return (found[1],)
    while text.startswith("template"):
        text = _behind_brackets(text)
    text = _ATTRIBUTE.sub("", text)
    if found := _TYPE.match(text) or _USING.match(text):
        return (found[1],)
    if found := _ENUM.match(text):
        return tuple(_WORD.findall(text[found.end() :]))
    head = text.partition("{")[0]
    if head.startswith(("using", "static_assert")):
        return ()
    if "operator" in head:
        return tuple(_WORD.findall(head.partition("operator")[2].partition("(")[2])[:1] or ())
    if found := _FUNCTION.search(head) or _VARIABLE.search(text):
        return (found[1],)
    return ()


def _behind_brackets(text: str) -> str:
    """The text after `template <...>`."""
    depth = 0
    for at, c in enumerate(text):
        depth += (c == "<") - (c == ">")
        if c == ">" and depth == 0:
            return text[at + 1 :].lstrip()
    return ""


@cache
def _by_name(skeleton: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, part in enumerate(_parts(skeleton)):
        for name in part.names:
            found.setdefault(name, []).append(i)
    return found


@cache
def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text))
