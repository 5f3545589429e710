"""The text that the 1m model is trained, calibrated and evaluated on: the sources of Python's documentation.

    python -m examples.featuregate.corpus       writes calibration.txt and evaluation.txt

DATA.md tells where the sources come from.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Literal

Split = Literal["training", "calibration", "evaluation"]

HERE = Path(__file__).parent
# Debian's package python3.11-doc installs them here.
SOURCES = Path("/usr/share/doc/python3.11/html/_sources")
HELD_OUT: tuple[Split, ...] = ("calibration", "evaluation")
HELD_OUT_SHARE = 0.025
EXCERPT_BYTES = 128 * 1024


def split_of(path: str) -> Split:
    """The split that the file belongs to; `path` is relative to the sources and written with slashes."""
    place = int.from_bytes(hashlib.sha1(path.encode()).digest()) / 2**160
    if place < HELD_OUT_SHARE:
        return "calibration"
    if place < 2 * HELD_OUT_SHARE:
        return "evaluation"
    return "training"


def read(*splits: Split, sources: Path = SOURCES) -> bytes:
    """All files of the splits, in the order of their paths."""
    files = {file.relative_to(sources).as_posix(): file for file in sources.rglob("*.rst.txt")}
    if not files:
        raise FileNotFoundError(f"no *.rst.txt in {sources}: install Debian's package python3.11-doc")
    return b"".join(files[path].read_bytes() for path in sorted(files) if split_of(path) in splits)


def excerpt(text: bytes) -> bytes:
    """The first whole lines that fit into an excerpt."""
    return text[: text.rindex(b"\n", 0, EXCERPT_BYTES) + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the held-out texts that are kept in the repository.")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="the folder _sources of the documentation")
    sources: Path = parser.parse_args().sources
    for split in HELD_OUT:
        text = excerpt(read(split, sources=sources))
        (HERE / f"{split}.txt").write_bytes(text)
        print(f"{split}.txt  {len(text)} bytes  SHA-256 {hashlib.sha256(text).hexdigest()}")


if __name__ == "__main__":
    main()
