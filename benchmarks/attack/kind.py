"""What a hostile kind of benchmarks.attack is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.attack.send import Reply, Target


@dataclass(frozen=True)
class Kind:
    """One kind of hostile request; the generator of random numbers decides what may vary in it.

    must_refuse  an answer would be a fault: the call is none that a client may make
    is_hole      known to kill tritonserver 2.51 itself, whatever stands behind it
    """

    name: str
    send: Callable[[Target, random.Random], Reply]
    must_refuse: bool = False
    is_hole: bool = False
