"""Bernoulli draws in host memory, as in dropout: the same numbers as torch's, in an eighth of torch's time.

Torch draws them one by one. `kernels/cpu/mersenne_twister.h` draws many at a time from the state of torch's generator,
and writes the new state back, so every number that is drawn later is the same as in eager torch, too.
"""

from __future__ import annotations

import math
import struct
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import FrameType

import torch

from opgraph.errors import DeviceError
from opgraph.runtime.kernel_sequence import native_entry
from opgraph.runtime.providers.torch_internals import without_modes

aten = torch.ops.aten

#: For fewer elements torch takes less time: reading the state and writing it back takes about 15 us.
_FEWEST = 4096
#: Bytes of a state that the native loop reads: a seed, two numbers of 32 bits, a place and 624 words.
_STATE = 8 * (1 + 1 + 1 + 624)
#: Functions, by module and name, that run for the whole life of a thread and draw no numbers.
_DRAWING_NOTHING = frozenset(
    (
        ("multiprocessing.queues", "_feed"),
        ("torch._inductor.compile_worker.subproc_pool", "_read_thread"),
        ("torch.utils.data._utils.pin_memory", "_pin_memory_loop"),
        ("tqdm._monitor", "run"),
    )
)


def bernoulli(like: torch.Tensor, p: float, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Computes `aten.bernoulli.p`: 1 with the probability `p`, else 0.

    Args:
        like: has the shape, dtype and device of the result; its elements are not read.
        p: from 0 to 1.
        generator: torch's default generator, unless given.

    Returns: a contiguous tensor.
    """
    is_fast = generator is None and like.is_cpu and like.numel() >= _FEWEST and 0 <= p <= 1 and _draws_alone()
    native = _native() if is_fast else None
    drawn = torch.empty(like.shape, dtype=torch.bool, device=like.device) if native is not None else None
    if native is not None and type(drawn) is torch.Tensor:  # a fake tensor has no memory
        native(torch.default_generator, drawn, p)
        return drawn.to(like.dtype)
    made: torch.Tensor = aten.bernoulli.p(like, p, generator=generator)
    return made


def _draws_alone() -> bool:
    """True if no other thread of Python can draw numbers.

    Python code cannot hold the lock of torch's generator: numbers that another thread drew between the read and the
    write of the state would be drawn again.
    """
    own = threading.get_ident()
    return all(thread == own or _draws_nothing(frame) for thread, frame in sys._current_frames().items())


def _draws_nothing(frame: FrameType | None) -> bool:
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _DRAWING_NOTHING:
            return True
        frame = frame.f_back
    return False


@cache
def _native() -> Callable[[torch.Generator, torch.Tensor, float], None] | None:
    """A function that fills a tensor of bools from a generator and advances the generator.

    None without a compiler, or if this version of torch draws other numbers: the function is compared with torch here.
    """
    try:
        entry = native_entry("cpu/mersenne_twister.h", "og_bernoulli", None)
    except DeviceError:
        return None

    def draw(generator: torch.Generator, out: torch.Tensor, p: float) -> None:
        state = generator.get_state()
        limit = math.ceil(math.ldexp(p, 53))  # n / 2**53 < p for integers n below the limit
        entry(struct.pack("4Q", state.data_ptr(), out.data_ptr(), out.numel(), limit))
        generator.set_state(state)

    with without_modes():  # the first call may be on tensors without data
        own, torchs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
        if own.get_state().nbytes < _STATE:
            return None
        wanted = torch.empty(3001, dtype=torch.bool, device="cpu").bernoulli_(0.3, generator=torchs)
        drawn = torch.empty_like(wanted)
        draw(own, drawn, 0.3)
        is_same = torch.equal(drawn, wanted) and torch.equal(own.get_state(), torchs.get_state())
    return draw if is_same else None
