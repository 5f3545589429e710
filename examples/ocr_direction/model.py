"""A third-party classifier with trained squeeze-excite gates: does a line of text stand upright or upside down?

The network is the torch definition inside the package `rapidocr`, untouched; its weights are those of the ONNX file in
the same package (PaddleOCR's `ch_ppocr_mobile_v2.0_cls`, Apache-2.0, (c) Baidu). Inputs are lines of English text,
rendered here. `pip install --no-deps rapidocr==3.10.0 pillow onnx` brings everything; see README.md.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

HEIGHT, WIDTH = 48, 192
TEXTS = Path(__file__).resolve().parent.parent / "featuregate"
UPRIGHT, UPSIDE_DOWN = 0, 1


def trained() -> tuple[nn.Module, Tensor]:
    """The trained classifier and eight example images, [inputs, 3, 48, 192]; it returns probabilities."""
    package = _package()
    definitions = str(package / "inference_engine" / "pytorch")
    sys.path.insert(0, definitions)
    try:
        from networks.architectures.base_model import BaseModel
    finally:
        sys.path.remove(definitions)
    module = BaseModel(
        {
            "model_type": "cls",
            "Transform": None,
            "Backbone": {"name": "MobileNetV3", "model_name": "small", "scale": 0.35},
            "Neck": None,
            "Head": {"name": "ClsHead", "class_dim": 2},
        }
    ).eval()
    copy_weights(package / "models" / "ch_ppocr_mobile_v2.0_cls_mobile.onnx", module)
    return module, evaluation()["x"][:8]


def evaluation() -> dict[str, Tensor]:
    """64 lines of the evaluation text, half of them upside down: `x` and `targets`."""
    return _lines(TEXTS / "evaluation.txt", 64)


def calibration() -> dict[str, Tensor]:
    """64 lines of the calibration text, half of them upside down: `x` and `targets`."""
    return _lines(TEXTS / "calibration.txt", 64)


def _package() -> Path:
    spec = importlib.util.find_spec("rapidocr")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("rapidocr is not installed: pip install --no-deps rapidocr==3.10.0")
    return Path(spec.origin).parent


def copy_weights(path: Path, module: nn.Module) -> None:
    """Copy the tensors of an ONNX export into the modules that run in the same order.

    Paddle writes the bias of a squeeze-excite convolution as a separate `Add(Reshape(constant))`.
    """
    graph = onnx.load(path).graph
    constants = {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in graph.node if n.op_type == "Constant"}
    reshaped = {
        n.output[0]: constants[n.input[0]] for n in graph.node if n.op_type == "Reshape" and n.input[0] in constants
    }
    readers = {name: node for node in graph.node for name in node.input}
    modules = _in_execution_order(module)
    with torch.no_grad():
        for node in graph.node:
            if node.op_type == "Conv":
                convolution = next(modules)
                assert isinstance(convolution, nn.Conv2d)
                convolution.weight.copy_(torch.from_numpy(constants[node.input[1]].copy()))
                if convolution.bias is not None:
                    add = readers[node.output[0]]
                    bias = next(reshaped[name] for name in add.input if name in reshaped)
                    convolution.bias.copy_(torch.from_numpy(bias.copy()).reshape(-1))
            elif node.op_type == "BatchNormalization":
                norm = next(modules)
                assert isinstance(norm, nn.BatchNorm2d)
                targets = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
                for target, name in zip(targets, node.input[1:], strict=True):
                    target.copy_(torch.from_numpy(constants[name].copy()))
                for attribute in node.attribute:
                    if attribute.name == "epsilon":
                        norm.eps = attribute.f
            elif node.op_type == "MatMul":
                linear = next(modules)
                assert isinstance(linear, nn.Linear)
                linear.weight.copy_(torch.from_numpy(constants[node.input[1]].copy()).T)
                add = readers[node.output[0]]
                linear.bias.copy_(torch.from_numpy(constants[add.input[1]].copy()))
    if next(modules, None) is not None:
        raise ValueError(f"{path} holds fewer layers than the torch definition")


def _in_execution_order(module: nn.Module) -> Iterator[nn.Module]:
    """The modules with weights, in the order in which a forward call reaches them."""
    order: list[nn.Module] = []
    layers = [m for m in module.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.Linear)]
    handles = [layer.register_forward_pre_hook(lambda m, _: order.append(m)) for layer in layers]
    with torch.no_grad():
        module(torch.zeros(1, 3, HEIGHT, WIDTH))
    for handle in handles:
        handle.remove()
    return iter(order)


def _lines(path: Path, count: int) -> dict[str, Tensor]:
    text = (line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    phrases = [line[:24] for line in text if len(line) >= 24 and line[:24].replace(" ", "").isalpha()]
    phrases = list(dict.fromkeys(phrases))[:count]
    if len(phrases) < count:
        raise ValueError(f"{path} has only {len(phrases)} usable lines")
    turned = [i % 2 for i in range(count)]
    images = [_render(phrase, bool(turn)) for phrase, turn in zip(phrases, turned, strict=True)]
    return {"x": torch.stack(images), "targets": torch.tensor([UPSIDE_DOWN if t else UPRIGHT for t in turned])}


def _render(phrase: str, upside_down: bool) -> Tensor:
    """Black on white, [3, 48, 192], scaled as the package scales its inputs."""
    font = ImageFont.load_default(size=34)
    left, top, right, bottom = font.getbbox(phrase)
    page = Image.new("L", (int(right - left) + 12, int(bottom - top) + 12), 255)
    ImageDraw.Draw(page).text((6 - left, 6 - top), phrase, fill=0, font=font)
    # Long lines are cut, as a detector's crops are.
    page = page.resize((max(1, page.width * HEIGHT // page.height), HEIGHT)).crop((0, 0, WIDTH, HEIGHT))
    if upside_down:
        page = page.rotate(180)
    pixels = torch.frombuffer(bytearray(page.tobytes()), dtype=torch.uint8).view(1, HEIGHT, WIDTH)
    return ((pixels.float() / 255 - 0.5) / 0.5).expand(3, -1, -1).contiguous()
