"""Trains a preset, by default the tiny one on bytes of Python's documentation.

python -m examples.mudd.train --steps 1500 --precision fp32
"""

from examples import training
from examples.mudd.model import HERE, PRESETS, build

if __name__ == "__main__":
    training.main(training.Family(PRESETS, build, HERE, default="tiny"))
