"""The acceptance table: which controllers the library counts in public architectures.

Expected numbers are those of the published code: the table's, or a formula over the configuration. Configurations are
narrow. Where a row of the table names a full-size model its number of layers is kept if that is cheap, and a second row
with few layers follows the same rule; routers and AltUp are counted at full size, too, on the meta device. Vision
models have their full size.
"""

from __future__ import annotations

from tests.acceptance import families, full_size, language, papers, vision

ROWS = (
    *vision.CHANNEL_GATES,
    *language.NO_CONTROLLER,
    *language.ROUTERS,
    *language.GATES_AND_RECURRENCES,
    *families.FURTHER,
    *papers.PAPERS,
    *full_size.FULL_SIZE,
)
