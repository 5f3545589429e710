"""The models of the table: what each is, how it is trained, and how it is audited. All are audited by one command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "examples" / "paper"
AUDITS = HERE / "audits"
# Weights and reports that the repository does not keep; paths in records are relative to the repository.
WORK = Path("paper-work")

TEXTS = Path("examples/featuregate")
OPTIONS = (
    *("--data", str(TEXTS / "evaluation.txt"), "--calibration", str(TEXTS / "calibration.txt")),
    *("--limit", "64", "--batch-size", "8", "--seeds", "3", "--seed", "0"),
    *("--interventions", "reassign,shuffle-tokens,static", "--scope", "joint,controller", "--live"),
)


@dataclass(frozen=True)
class Model:
    """One trained model. `group` joins models that differ in their seed alone; None for one that stands by itself.

    `kept` is the folder of its weights and record in the repository; without one it is trained by `training`, the
    arguments of `python -m`.
    """

    name: str
    title: str
    factory: str
    training: tuple[str, ...]
    group: str | None = None
    kept: Path | None = None

    @property
    def home(self) -> Path:
        return self.kept or WORK / self.name

    @property
    def audit(self) -> Path:
        return AUDITS / self.name / "audit.json"

    @property
    def record(self) -> Path:
        return AUDITS / self.name / "training.json"

    def command(self, report: Path) -> tuple[str, ...]:
        """The arguments of `fxaudit` that audit this model."""
        weights = () if self.kept else ("--weights", str(self.home / "weights.safetensors"))
        return ("audit", self.factory, *weights, *OPTIONS, "-o", str(report))


FEATUREGATE, MUDD = "examples/featuregate/model.py:trained", "examples/mudd/model.py:trained"
FEATUREGATE_SEEDS = range(1, 8)
MODELS = (
    Model(
        "featuregate-1m-seed0",
        "FeatureGate 1M, embedded (seed 0, bf16)",
        FEATUREGATE,
        ("examples.featuregate.train", "--steps", "5000"),
        kept=TEXTS,
    ),
    *(
        Model(
            f"featuregate-1m-seed{seed}",
            f"FeatureGate 1M, seed {seed}",
            FEATUREGATE,
            ("examples.featuregate.train", "--steps", "5000", "--seed", str(seed), "--precision", "fp32"),
            group="FeatureGate 1M",
        )
        for seed in FEATUREGATE_SEEDS
    ),
    Model(
        "featuregate-280k",
        "FeatureGate 280k, seed 1",
        "examples/featuregate/model.py:untrained_280k",
        tuple("examples.featuregate.train --preset 280k --steps 5000 --seed 1 --precision fp32".split()),
    ),
    Model(
        "mudd-tiny",
        "MUDDPythia, tiny",
        MUDD,
        ("examples.mudd.train", "--steps", "1500", "--precision", "fp32"),
        kept=Path("examples/mudd"),
    ),
)
