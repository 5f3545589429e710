"""The memory that is free."""

from __future__ import annotations

import os


def free_memory() -> int | None:
    """Bytes of memory that are free; None where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
