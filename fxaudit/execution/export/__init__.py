"""A frozen model as ONNX files: live, tapped, bound and baked, all derived from one export.

Each coefficient is cut by a *barrier* in the traced graph: a custom op that the exporter turns into a custom ONNX op,
so that no pass can merge, fold or remove what stands before and after it. Only when every pass is done are the barriers
taken out (live, tapped), or replaced by inputs (bound) or constants (baked). The graphs then share their node names,
and what a controller costs is the set difference between them.

Shared sub-expressions are left apart and parameters as they are: the ONNX graph does what the torch graph does.
"""

from fxaudit.execution.export.exported import ExportedGraphs, RemovedNode, RemovedParameter
from fxaudit.execution.export.graphs import export_graphs

__all__ = ["ExportedGraphs", "RemovedNode", "RemovedParameter", "export_graphs"]
