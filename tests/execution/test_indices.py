"""Indices of 32 bits: torch takes them, ONNX's GatherND and ScatterND do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from fxaudit import stages
from fxaudit.execution.export import export_graphs


class Placed(nn.Module):
    """A gate on rows that are taken, and then written, at 32-bit positions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(9, 8))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=torch.int)
        x = x + self.table[places]
        x = torch.sigmoid(self.gate(x)) * self.value(x)
        cache = torch.zeros(x.shape[0], 9, 8)
        cache[:, places] = x
        return cache


def test_a_model_with_indices_of_32_bits_runs_on_onnxruntime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Placed().eval(), torch.randn(3, 5, 8)
    exported = export_graphs(stages.freeze(model, (x,)), tmp_path)
    session = onnxruntime.InferenceSession(str(exported.live), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, model(x).numpy(), atol=1e-6)
