"""Which pickled modules load without the user's trust: those that name nothing but known layers and plain values.

The restricted unpickler of torch calls whatever it is told is safe, with arguments from the file. So a pickle is
followed first, and admitted only if it

* makes modules and configurations of torch, torchvision, timm and transformers by `__new__` alone, never by a call of
  their constructors, and fills them with plain attributes that hide no method;
* calls nothing but what rebuilds tensors, and `functools.partial` of a layer;
* holds classes and functions as values only where they are layers and activation functions.

Then torch loads it under `weights_only=True` with exactly the classes that were admitted.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxaudit.model.pickles import Call, Constant, Container, Global, Pickle, constant_of, pairs_of, values_inside

# Where modules and configurations are defined, as patterns over module names.
_LAYERS = re.compile(r"torch\.nn\.modules\.\w+|torchvision\.ops\.\w+|timm\.layers\.\w+|transformers\.activations")
_MODELS = re.compile(
    r"torchvision\.models(\.\w+)+|timm\.models(\.\w+)+|transformers\.(pytorch_utils|modeling_layers)"
    r"|transformers\.models\.\w+\.modeling_\w+"
)
_CONFIGURATIONS = re.compile(
    r"transformers\.models\.\w+\.configuration_\w+|transformers\.configuration_utils"
    r"|transformers\.generation\.configuration_utils"
)
# What modules hold as attributes and call: functions of tensors without any other effect.
_FUNCTIONS = {
    f"torch.nn.functional.{name}": getattr(nn.functional, name)
    for name in "elu gelu hardswish hardsigmoid leaky_relu mish relu relu6 selu sigmoid silu softmax tanh".split()
} | {
    "torch._C._nn.gelu": torch._C._nn.gelu,
    "torch._C._nn.softplus": torch._C._nn.softplus,
}
# What rebuilds tensors and plain containers. All of it is allowed by torch's restricted unpickler too.
_REBUILD = {
    *(f"torch._utils._rebuild_{kind}" for kind in "tensor tensor_v2 tensor_v3 parameter parameter_with_state".split()),
    *"collections.OrderedDict torch.Size torch.device torch.serialization._get_layout _codecs.encode".split(),
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "complex", "bytearray")),
}
_REBUILD_TENSOR = {f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter")}
_REBUILD_OF_TYPE = "torch._tensor._rebuild_from_type_v2"
_TENSOR_TYPES = {"torch.Tensor", "torch.nn.parameter.Parameter"}
_PARTIAL = "functools.partial"
# Methods through which a class would have a say in how it is unpickled or stored.
_HOOKS = "__setstate__ __new__ __del__ __hash__ __getattr__ __setattr__ __getattribute__".split()
# transformers fetches and runs kernels of the hub where a configuration names one as implementation.
_IMPLEMENTATION = re.compile(r"[\w ]*")


@dataclass(slots=True)
class Admission:
    """What keeps a pickled module from being loaded without trust, and what torch may make of it otherwise.

    `root` is the name of the class of the pickled object.
    """

    root: str
    refused: list[str] = field(default_factory=list)
    allowed: list[Any] = field(default_factory=list)


def admit(pickle: Pickle) -> Admission:
    """Whether the object in `pickle` is made of known layers and plain values only."""
    return _Judge(pickle).judge()


def is_module(pickle: Pickle) -> bool:
    """Whether the pickle makes an object of a class, as opposed to plain values and tensors."""
    root = pickle.result
    return isinstance(root, Call) and root.is_new and isinstance(root.callee, Global)


class _Judge:
    def __init__(self, pickle: Pickle) -> None:
        self.pickle = pickle
        self.found: dict[str, Any] = {}
        root = pickle.result
        callee = root.callee if isinstance(root, Call) else None
        self.admission = Admission(callee.path if isinstance(callee, Global) else "")

    def judge(self) -> Admission:
        for call in self.pickle.calls:
            self._judge_call(call)
        # A class that is made is named as a callee; named anywhere else it could be called later.
        for container in self.pickle.containers:
            for item in container.items:
                self._judge_value(item)
        for call in self.pickle.calls:
            for item in (*call.states, *call.items):
                self._judge_value(item)
        self._judge_value(self.pickle.result)
        self.admission.allowed = [
            (value, path) for path, value in self.found.items() if value is not None and value is not False
        ]
        self.admission.refused = list(dict.fromkeys(self.admission.refused))
        return self.admission

    def _refuse(self, what: str) -> None:
        self.admission.refused.append(what)

    def _judge_call(self, call: Call) -> None:
        callee = call.callee
        if not isinstance(callee, Global):
            self._refuse("a call of something that is no name")
        elif call.is_new:
            self._judge_new(callee, call)
        elif callee.path == _PARTIAL:
            self._judge_partial(call)
        elif callee.path == _REBUILD_OF_TYPE:
            self._judge_rebuilt(call)
        elif callee.path not in _REBUILD and not self._is_enumeration(callee, call):
            self._refuse(callee.path)
        elif callee.path.endswith("_with_state"):
            self._judge_plain(call.arguments, callee)
        if not call.is_new and isinstance(callee, Global) and callee.path != _PARTIAL:
            for state in call.states:
                self._judge_plain(state, callee)

    def _judge_new(self, callee: Global, call: Call) -> None:
        made = self._class(callee)
        if made is None:
            self._refuse(callee.path)
            return
        if not isinstance(call.arguments, Container) or call.arguments.items or call.items:
            self._refuse(f"{callee.path} with arguments")
        for state in call.states:
            pairs = pairs_of(state)
            if pairs is None:
                self._refuse(f"a state of {callee.path} that is no dict")
                continue
            for key, value in pairs:
                self._judge_attribute(made, callee, constant_of(key), value)

    def _judge_attribute(self, made: type, callee: Global, name: Any, value: Any) -> None:
        if not isinstance(name, str) or (name.startswith("__") and name.endswith("__")):
            self._refuse(f"an attribute of {callee.path} without a name")
        elif inspect.isfunction(inspect.getattr_static(made, name, None)):
            self._refuse(f"{callee.path} with a `{name}` of its own")
        elif name.endswith("_hooks") and _is_filled(value):
            self._refuse(f"{callee.path} with {name.strip('_').replace('_', ' ')}")
        elif name in ("_use_kernels", "use_kernels") and constant_of(value):
            self._refuse(f"{callee.path} with kernels of the hub")
        elif "implementation" in name:
            texts = [v for inner in values_inside(value) if isinstance(v := constant_of(inner), str)]
            if not all(_IMPLEMENTATION.fullmatch(text) for text in texts):
                self._refuse(f"{callee.path} with a kernel of the hub as {name.strip('_')}")

    def _judge_partial(self, call: Call) -> None:
        """`partial(layer, ...)`, its state being (layer, arguments, keywords, attributes)."""
        arguments = call.arguments.items if isinstance(call.arguments, Container) else []
        states = [state.items if isinstance(state, Container) else [] for state in call.states]
        functions = [*arguments[:1], *(items[0] for items in states if items)]
        is_known = len(arguments) == 1 and all(len(items) == 4 for items in states)
        if not is_known or not all(isinstance(f, Global) and self._layer(f) is not None for f in functions):
            self._refuse("functools.partial of something that is no layer")
        self.found[_PARTIAL] = functools.partial

    def _judge_rebuilt(self, call: Call) -> None:
        """A tensor with attributes: (what rebuilds it, its type, arguments, attributes)."""
        arguments = call.arguments.items if isinstance(call.arguments, Container) else []
        if (
            len(arguments) != 4
            or not isinstance(arguments[0], Global)
            or not isinstance(arguments[1], Global)
            or arguments[0].path not in _REBUILD_TENSOR
            or arguments[1].path not in _TENSOR_TYPES
        ):
            self._refuse(_REBUILD_OF_TYPE)
            return
        self._judge_plain(arguments[3], arguments[1])

    def _is_enumeration(self, callee: Global, call: Call) -> bool:
        """A member of an enumeration of timm, looked up by its value."""
        items = call.arguments.items if isinstance(call.arguments, Container) else []
        if not callee.module.startswith("timm.layers.") or not _LAYERS.fullmatch(callee.module):
            return False
        found = _member(callee)
        if not isinstance(found, enum.EnumMeta) or len(items) != 1 or not isinstance(items[0], Constant):
            return False
        self.found[callee.path] = found
        return True

    def _judge_plain(self, state: Any, owner: Global) -> None:
        """Attributes that are set on a tensor or container: named as such, and nothing that could be called."""
        for inner in values_inside(state):
            for key, _ in pairs_of(inner) or []:
                name = constant_of(key)
                if isinstance(name, str) and (name.startswith("__") or not name.isidentifier()):
                    self._refuse(f"{owner.path} with an attribute `{name}`")
            if isinstance(inner, Global) and (inner.path in _FUNCTIONS or self._class(inner) is not None):
                self._refuse(f"{owner.path} with {inner.path}")

    def _judge_value(self, value: Any) -> None:
        if isinstance(value, Global) and not _is_of_tensors(value) and self._layer(value) is None:
            self._refuse(value.path)

    def _class(self, name: Global) -> type | None:
        """The class that a name stands for, if a pickle may make objects of it."""
        if name.path not in self.found:
            self.found[name.path] = _admitted_class(name)
        found = self.found[name.path]
        return found if isinstance(found, type) else None

    def _layer(self, name: Global) -> Any:
        """The layer or function that a name stands for, if modules may hold and call it."""
        if name.path in _FUNCTIONS:
            self.found[name.path] = _FUNCTIONS[name.path]
            return self.found[name.path]
        return self._class(name) if _LAYERS.fullmatch(name.module) else None


def _is_filled(value: Any) -> bool:
    return bool(getattr(value, "items", None)) or constant_of(value) is not None


def _is_of_tensors(name: Global) -> bool:
    """A storage type, a dtype, or one of the names that rebuilding a tensor takes as arguments."""
    if name.path in _TENSOR_TYPES | _REBUILD_TENSOR or name.path in _REBUILD:
        return True
    if name.module == "torch" and isinstance(getattr(torch, name.name, None), torch.dtype):
        return True
    return name.module in ("torch", "torch.storage", "torch.cuda") and name.name.endswith("Storage")


def _admitted_class(name: Global) -> type | None:
    places = (_LAYERS, _MODELS, _CONFIGURATIONS)
    if not name.name.isidentifier() or not any(place.fullmatch(name.module) for place in places):
        return None
    found = _member(name)
    if found is None:
        return None
    if _CONFIGURATIONS.fullmatch(name.module):
        from transformers import GenerationConfig, PretrainedConfig

        return found if issubclass(found, PretrainedConfig | GenerationConfig) else None
    if not issubclass(found, nn.Module) or issubclass(found, torch.jit.ScriptModule | torch.fx.GraphModule):
        return None
    return found if not _has_own_hook(found) else None


def _member(name: Global) -> type | None:
    """The class of that name in that module, if the module itself defines it."""
    try:
        found = getattr(importlib.import_module(name.module), name.name)
    except Exception:  # no such module or class in the installed version
        return None
    is_own = isinstance(found, type) and (found.__module__, found.__qualname__) == (name.module, name.name)
    return found if is_own else None


def _has_own_hook(found: type) -> bool:
    """Whether a class outside torch.nn decides how it is unpickled."""
    for base in found.__mro__:
        if base in (nn.Module, object) or base.__module__.startswith("torch.nn.modules."):
            continue
        if any(hook in vars(base) for hook in _HOOKS):
            return True
    return False
