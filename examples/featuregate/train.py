"""Trains a preset, by default on bytes of Python's documentation, and writes weights.safetensors and training.json.

    python -m examples.featuregate.train --steps 5000

README.md has the commands for the larger presets.
"""

from examples import training
from examples.featuregate.model import HERE, PRESETS, build

if __name__ == "__main__":
    training.main(training.Family(PRESETS, build, HERE, default="1m"))
