"""How a model is executed."""

from __future__ import annotations

from dataclasses import dataclass

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
# Fresh processes in which times are taken.
BLOCKS = 10


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """What is run beside the counts, which always come from the CPU.

    `provider` is where evidence and times come from. With `timed` times are measured, in `blocks` blocks. Without
    `probing` only the inputs given are run, without `evident` only unoptimised graphs.
    """

    provider: str = CPU
    timed: bool = False
    blocks: int = BLOCKS
    probing: bool = True
    evident: bool = True
    seed: int = 0
