"""Transformer-like graphs of any size, made node by node: what the matcher's cost is measured on."""

from .build import Build

TOKENS, WIDTH, HEADS = 8, 16, 2


def transformer(layers):
    """A graph of about sixty nodes a layer, with one gated attention output in each: the module."""
    build = Build()
    x = build.input(2, TOKENS, WIDTH)
    angles = build("sigmoid", build.parameter(TOKENS, WIDTH // HEADS))
    before = len(build.graph.nodes)
    out = _layer(build, x, angles)
    layer = list(build.graph.nodes)[before:]
    for _ in range(layers - 1):
        # Copies of the first layer: running each op again would take most of the time.
        copies = {x: out}
        for node in layer:
            copies[node] = build.graph.node_copy(node, lambda source: copies.get(source, source))  # noqa: B023
        out = copies[layer[-1]]
    return build.module(out)


def _layer(build, x, angles):
    h = build("layer_norm", x, [WIDTH], build.parameter(WIDTH), build.parameter(WIDTH))
    q, k, v = (_heads(build, build.linear(h, WIDTH)) for _ in range(3))
    q, k = _turned(build, q, angles), _turned(build, k, angles)
    scores = build("mul.Scalar", build("matmul", q, build("transpose.int", k, -1, -2)), 0.35)
    mixed = build("matmul", build("softmax.int", scores, -1), v)
    merged = build("reshape", build("transpose.int", mixed, 1, 2), [2, TOKENS, WIDTH])
    gate = build("sigmoid", build.linear(h, WIDTH))
    x = build.add(x, build.linear(build.mul(merged, gate), WIDTH))
    h = build("rsqrt", build("add.Scalar", build("mean.dim", build("pow.Tensor_Scalar", x, 2), [-1], True), 1e-6))
    h = build.mul(build.mul(x, h), build.parameter(WIDTH))
    up = build.mul(build("silu", build.linear(h, WIDTH)), build.linear(h, WIDTH))
    return build.add(x, build.linear(up, WIDTH))


def _heads(build, x):
    return build("transpose.int", build("view", x, [2, TOKENS, HEADS, WIDTH // HEADS]), 1, 2)


def _turned(build, x, angles):
    size = WIDTH // HEADS
    low, high = (build("slice.Tensor", x, -1, *ends) for ends in ((0, size // 2), (size // 2, size)))
    turned = build("cat", [build("neg", high), low], -1)
    return build.add(build.mul(x, angles), build.mul(turned, angles))
