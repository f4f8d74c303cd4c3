"""Bernoulli draws in host memory, as dropout makes them: torch's own numbers in a tenth of its time.

Torch draws them one by one. `kernels/mersenne_twister.h` draws many at a time from the state of torch's generator, and
puts the state afterwards back, so every number that is drawn later is eager torch's, too.
"""

from __future__ import annotations

import math
import struct
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import FrameType

import numpy as np
import torch

from opgraph.errors import DeviceError
from opgraph.runtime.kernel_sequence import native_entry

aten = torch.ops.aten

#: Elements below which torch takes less time: the state is read, compared and written back in some 15 us.
_FEWEST = 4096
#: Bytes of a state that the native loop reads: a seed, two numbers of 32 bits, a place and 624 words.
_STATE = 8 * (1 + 1 + 1 + 624)
#: Functions of Python's own packages in which threads wait, and draw nothing.
_PACKAGES = frozenset(("concurrent", "multiprocessing", "queue", "selectors", "threading"))
_WAITING = frozenset(("_recv", "_wait_for_tstate_lock", "_worker", "get", "join", "select", "wait"))
#: Two calls that read one state would draw the same numbers.
_drawing = threading.Lock()


def bernoulli(like: torch.Tensor, p: float, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """What `aten.bernoulli.p` computes: 1 with the probability `p`, else 0.

    Args:
        like: of the shape, dtype and device of the result; its elements are not read.
        p: from 0 to 1.
        generator: torch's default generator, unless given.

    Returns: a contiguous tensor.
    """
    is_fast = generator is None and like.is_cpu and like.numel() >= _FEWEST and 0 <= p <= 1 and _is_alone()
    native = _native() if is_fast else None
    drawn = torch.empty(like.shape, dtype=torch.bool, device=like.device) if native is not None else None
    own = torch.default_generator
    if native is not None and type(drawn) is torch.Tensor:  # a fake one has no memory
        with _drawing:
            before = own.get_state().numpy()
            after = native(before, drawn, p)
            if _is_alone() and np.array_equal(own.get_state().numpy(), before):
                own.set_state(torch.from_numpy(after))
                return drawn.to(like.dtype)
    made: torch.Tensor = aten.bernoulli.p(like, p, generator=generator)
    return made


def _is_alone() -> bool:
    """Whether no other thread draws numbers, or can begin to before this one gives up the interpreter's lock."""
    has_lock: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)  # of Python 3.13
    own = threading.get_ident()
    return (has_lock is None or has_lock()) and all(
        thread == own or _waits(frame) for thread, frame in sys._current_frames().items()
    )


def _waits(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in _PACKAGES and frame.f_code.co_name in _WAITING


@cache
def _native() -> Callable[[np.ndarray, torch.Tensor, float], np.ndarray] | None:
    """What fills a tensor of bools from a generator's state and returns the state afterwards.

    None without a compiler, and where this torch draws other numbers: it is compared with torch here.
    """
    try:
        entry = native_entry("mersenne_twister.h", "og_bernoulli", None)
    except DeviceError:
        return None

    def draw(state: np.ndarray, out: torch.Tensor, p: float) -> np.ndarray:
        after = state.copy()
        limit = math.ceil(math.ldexp(p, 53))  # below p is below this for numbers of 53 bits
        entry(struct.pack("4Q", after.ctypes.data, out.data_ptr(), out.numel(), limit))
        return after

    generator = torch.Generator().manual_seed(1)
    before = generator.get_state().numpy()
    if before.nbytes < _STATE:
        return None
    theirs = torch.empty(3001, dtype=torch.bool, device="cpu").bernoulli_(0.3, generator=generator)
    ours = torch.empty_like(theirs)
    state = draw(before, ours, 0.3)
    is_same = torch.equal(ours, theirs) and np.array_equal(state, generator.get_state().numpy())
    return draw if is_same else None
