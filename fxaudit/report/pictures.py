"""The pictures of a report as inline SVG, and numbers as text, the same in pictures and tables.

A picture is drawn twice, wide and narrow, and the style sheet shows one of them: scaling one picture down to a phone
would make its text unreadable. Colors come from the style sheet too, except for heat maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup, escape

COLUMNS = 64  # cells of one heat-map row; longer rows show means of neighbours
PANELS = 6  # panels side by side
WIDE, NARROW = 920, 344  # pixels at scale 1
CHARACTER = 7.0  # advance of the 12 px text in names rich in wide letters, to leave room for it
UNRESOLVED = "not resolvable"

LEVELS = {
    "element": "single coefficients",
    "mean_input_position": "means over inputs and positions",
    "mean_unit": "means over units",
    "mean_unit_position": "means over units and positions",
}
SHARES = ("unit", "position", "input", "residual")
# Nine points of viridis, which keeps its order in print and for every kind of color vision.
RAMP = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:#.4g}"


def percent(share: float | None) -> str:
    if share is None:
        return UNRESOLVED
    return "< 0.001 %" if 0 < abs(share) < 1e-5 else f"{100 * share:#.3g}".rstrip(".") + " %"


def count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def spread(values: Sequence[int] | None) -> str:
    """One number for all inputs where they agree, else the smallest and the largest."""
    if not values:
        return "–"
    low, high = min(values), max(values)
    return count(low) if low == high else f"{low:,} to {high:,}"


def change(row: Mapping[str, Any]) -> str:
    """The effect of an intervention, with the digits that its interval leaves meaning to."""
    return "–" if row["delta"] is None else f"{row['delta']:+{_digits(row['interval'])}}"


def interval(row: Mapping[str, Any]) -> str:
    ends = row["interval"]
    return UNRESOLVED if ends is None else f"[{ends[0]:{_digits(ends)}}, {ends[1]:{_digits(ends)}}]"


def _digits(ends: Sequence[float] | None) -> str:
    """A format with three digits of the width of an interval."""
    width = ends[1] - ends[0] if ends is not None else 0.0
    places = 2 - math.floor(math.log10(width)) if width > 0 and math.isfinite(width) else -1
    return f".{places}f" if 0 <= places <= 8 else "#.4g"


def drawn(draw: Callable[[int], Markup]) -> Markup:
    return draw(WIDE) + draw(NARROW)


def _tag(name: str, *content: str, **attributes: object) -> Markup:
    """An SVG element; attributes and content are escaped, unless the content is markup already."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(f"{value:.2f}" if isinstance(value, float) else value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{''.join(map(escape, content))}</{name}>")


def _text(x: float, y: float, content: str, kind: str = "label", anchor: str = "start") -> Markup:
    return _tag("text", content, x=float(x), y=float(y), class_=kind, text_anchor=anchor)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return _tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=kind)


def _box(x: float, y: float, width: float, height: float, *content: str, **attributes: object) -> Markup:
    return _tag(
        "rect", *content, x=float(x), y=float(y), width=max(0.0, float(width)), height=float(height), **attributes
    )


def _svg(width: int, height: float, label: str, *content: str) -> Markup:
    """A whole picture; `label` is what a screen reader says in its place."""
    return _tag(
        "svg",
        *content,
        class_="wide" if width == WIDE else "narrow",
        viewBox=f"0 0 {width} {math.ceil(height)}",
        width=width,
        height=math.ceil(height),
        role="img",
        aria_label=label,
    )


def _short(text: str, room: float) -> str:
    """Text cut in its middle to fit: both ends of a module path tell modules apart."""
    limit = max(5, int(room / CHARACTER))
    if len(text) <= limit:
        return text
    tail = (limit - 1) * 2 // 3
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the rows of a picture are: labels left of the marks and values right of them, or both above the marks where
    the picture is narrow."""

    width: int
    labels: Sequence[str]
    values: Sequence[str]
    top: float = 6.0
    height: float = 22.0

    @property
    def is_narrow(self) -> bool:
        return self.width != WIDE

    @property
    def left(self) -> float:
        longest = max((len(label) for label in self.labels), default=0)
        return 12.0 if self.is_narrow else min(270.0, 18 + CHARACTER * longest)

    @property
    def right(self) -> float:
        longest = max((len(value) for value in self.values), default=0)
        return self.width - (14.0 if self.is_narrow else 20 + CHARACTER * longest)

    @property
    def step(self) -> float:
        return self.height + (17.0 if self.is_narrow else 0.0)

    @property
    def bottom(self) -> float:
        return self.top + self.step * len(self.labels)

    def middle(self, row: int) -> float:
        """The height of a row's marks."""
        return self.top + self.step * (row + 1) - self.height / 2

    def scale(self, low: float, high: float) -> Callable[[float], float]:
        return _linear(low, high, self.left, self.right)

    def words(self) -> Markup:
        """All labels and values, cut where they do not fit, with the whole label on hover."""
        written = Markup("")
        for row, (label, value) in enumerate(zip(self.labels, self.values, strict=True)):
            y = self.middle(row) + 4 - (self.height / 2 + 8 if self.is_narrow else 0)
            room = self.width - 34 - CHARACTER * len(value) if self.is_narrow else self.left - 12
            shown = _short(label, room)
            full = [_tag("title", label)] if shown != label else []
            written += _tag("text", *full, shown, x=2.0, y=float(y), class_="label")
            written += _text(self.width - 2, y, value, "value", "end")
        return written

    def axis(self, scale: Callable[[float], float], ticks: Sequence[float], write: Callable[[float], str]) -> Markup:
        """Grid lines behind the marks, with their values below."""
        drawn = Markup("")
        for tick in ticks:
            x, written = scale(tick), write(tick)
            middle = min(x, self.width - 1 - CHARACTER / 2 * len(written))
            drawn += _line(x, self.top, x, self.bottom, "grid")
            drawn += _text(middle, self.bottom + 14, written, "tick", "middle")
        return drawn


def _summary(what: str, labels: Sequence[str], values: Sequence[str]) -> str:
    """The numbers of a picture as a sentence, while a listener can follow it."""
    if len(labels) > 16:
        return f"{what}: {len(labels)} rows, with their numbers in the table that follows"
    return f"{what}: " + "; ".join(f"{label} {value}" for label, value in zip(labels, values, strict=True))


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two values, at least three where zero lies between."""
    ticks: list[float] = []
    while len(ticks) < 3:
        raw = (high - low) / about
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
        ticks = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        about += 1
    return ticks


def heat_maps(controllers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One heat map for each pattern and kind of column, as only those share a scale: positions where a controller has
    them, else units, ranked within their row because unit 3 of one layer is not unit 3 of another."""
    groups: dict[tuple[str, str], list[tuple[str, list[float]]]] = {}
    for c in controllers:
        if len(c["position_means"]) > 1:
            columns, means = "position", c["position_means"]
        else:
            columns, means = "unit", sorted(c["unit_means"], reverse=True)
        groups.setdefault((c["pattern"], columns), []).append((c["id"], means))
    return [
        {"pattern": pattern, "columns": columns, "binned": max(len(means) for _, means in rows) > COLUMNS}
        | {"picture": drawn(partial(_heat_map, columns, rows))}
        for (pattern, columns), rows in groups.items()
    ]


def _heat_map(columns: str, rows: Sequence[tuple[str, list[float]]], width: int) -> Markup:
    binned = [_bins(means) for _, means in rows]
    finite = [mean for bins in binned for _, _, mean in bins if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    spans = [f"{number(min(m for *_, m in bins))} to {number(max(m for *_, m in bins))}" for bins in binned]
    place = _Rows(width, [name for name, _ in rows], spans, height=16.0 if width == WIDE else 14.0)
    cells = Markup("").join(_heat_row(columns, bins, (low, high), place, row) for row, bins in enumerate(binned))
    first, last = ("first position", "last position") if columns == "position" else ("largest unit", "smallest unit")
    ends = _text(place.left, place.bottom + 14, first, "tick") + _text(
        place.right, place.bottom + 14, last, "tick", "end"
    )
    key_top, key_width = place.bottom + 26, min(240.0, place.right - place.left)
    key = Markup("").join(
        _box(place.left + i * key_width / 48, key_top, key_width / 48 + 0.5, 10, fill=_color(i / 47)) for i in range(48)
    )
    key += _text(place.left, key_top + 23, number(low), "tick") + _text(
        place.left + key_width, key_top + 23, number(high), "tick", "end"
    )
    label = _summary(f"Mean coefficient by controller and {columns}, smallest to largest mean", place.labels, spans)
    return _svg(width, key_top + 30, label, cells, place.words(), ends, key)


def _bins(means: Sequence[float]) -> list[tuple[int, int, float]]:
    """At most COLUMNS runs of neighbours: first, last, mean."""
    parts = min(COLUMNS, len(means))
    edges = [i * len(means) // parts for i in range(parts + 1)]
    return [
        (edges[i], edges[i + 1] - 1, math.fsum(means[edges[i] : edges[i + 1]]) / (edges[i + 1] - edges[i]))
        for i in range(parts)
    ]


def _heat_row(
    columns: str, bins: Sequence[tuple[int, int, float]], extent: tuple[float, float], place: _Rows, row: int
) -> Markup:
    step = (place.right - place.left) / len(bins)
    y, height = place.middle(row) - place.height / 2, place.height - 1
    noun = "position" if columns == "position" else "unit of rank"
    cells = Markup("")
    for i, (first, last, mean) in enumerate(bins):
        depth = (mean - extent[0]) / (extent[1] - extent[0]) if extent[1] > extent[0] else 0.5
        # The narrow picture is for screens without a pointer: no hover text, half the bytes.
        span = f"{noun} {first}" if first == last else f"{noun} {first} to {last}"
        hover = [] if place.is_narrow else [_tag("title", f"{place.labels[row]}, {span}: {number(mean)}")]
        cells += _box(place.left + i * step, y, step + 0.3, height, *hover, fill=_color(depth))
    return cells


def _color(depth: float) -> str:
    """The ramp at a depth between 0 and 1; grey for a value that is no number."""
    if not math.isfinite(depth):
        return "#999999"
    at = min(1.0, max(0.0, depth)) * (len(RAMP) - 1)
    i = min(int(at), len(RAMP) - 2)
    ends = [[int(RAMP[j][k : k + 2], 16) for k in (0, 2, 4)] for j in (i, i + 1)]
    return "#" + "".join(f"{round(a + (b - a) * (at - i)):02x}" for a, b in zip(*ends, strict=True))


def layer_bars(patterns: Sequence[Mapping[str, Any]], width: int) -> Markup:
    many = len(patterns) > 1
    rows = [(p, level) for p in patterns for level in LEVELS]
    labels = [f"{p['pattern']}, {LEVELS[level]}" if many else LEVELS[level] for p, level in rows]
    shares = [p["share"][level] for p, level in rows]
    place = _Rows(width, labels, [percent(share) for share in shares])
    scale = place.scale(0.0, 1.0)
    bars = Markup("").join(
        _box(place.left, place.middle(i) - 6, scale(share) - place.left, 12, class_="bar")
        for i, share in enumerate(shares)
        if share is not None
    )
    axis = place.axis(scale, (0, 0.25, 0.5, 0.75, 1), lambda tick: f"{100 * tick:g} %")
    label = _summary("Share of variance that is layer identity", labels, place.values)
    return _svg(width, place.bottom + 20, label, axis, bars, place.words())


def stacked_shares(controllers: Sequence[Mapping[str, Any]], width: int) -> Markup:
    labels = [c["id"] for c in controllers]
    place = _Rows(width, labels, ["" for _ in labels], top=30.0, height=18.0)
    scale = place.scale(0.0, 1.0)
    bars, legend, x = Markup(""), Markup(""), 2.0 if place.is_narrow else place.left
    for name in SHARES:
        legend += _box(x, 6, 11, 11, class_=f"share-{name}") + _text(x + 16, 16, name, "label")
        x += 30 + CHARACTER * len(name)
    for row, c in enumerate(controllers):
        start = 0.0
        for name in SHARES:
            share = max(0.0, c["shares"][name])  # a residual of zero can round to less
            hover = _tag("title", f"{c['id']}, {name}: {percent(c['shares'][name])}")
            left, right = scale(start), scale(min(1.0, start + share))
            bars += _box(left, place.middle(row) - 6, right - left, 12, hover, class_=f"share-{name}")
            start += share
    axis = place.axis(scale, (0, 0.25, 0.5, 0.75, 1), lambda tick: f"{100 * tick:g} %")
    written = [", ".join(f"{name} {percent(c['shares'][name])}" for name in SHARES) for c in controllers]
    label = _summary("Shares of variance within each controller", labels, written)
    return _svg(width, place.bottom + 20, label, legend, axis, bars, place.words())


def _effect(row: Mapping[str, Any]) -> str:
    return f"{change(row)} {interval(row)}"


def _extent(rows: Sequence[Mapping[str, Any]], margin: float | None) -> tuple[float, float]:
    """The values that an axis of effects must show, with zero and some air."""
    values = [0.0, *((-margin, margin) if margin is not None else ())]
    for row in rows:
        values += [v for v in (row["delta"], *(row["interval"] or ())) if v is not None and math.isfinite(v)]
    low, high = min(values), max(values)
    air = 0.06 * (high - low) or 1.0
    return low - air, high + air


def _effect_marks(row: Mapping[str, Any], scale: Callable[[float], float], y: float, hover: str) -> Markup:
    """A dot with its interval; a ring where there is no interval, nothing where there is no number."""
    if row["delta"] is None or not math.isfinite(row["delta"]):
        return Markup("")
    marks, ends = Markup(""), row["interval"]
    if ends is not None and all(map(math.isfinite, ends)):
        low, high = scale(ends[0]), scale(ends[1])
        marks += _line(low, y, high, y, "whisker")
        marks += _line(low, y - 3, low, y + 3, "whisker") + _line(high, y - 3, high, y + 3, "whisker")
    kind = "dot" if ends is not None else "ring"
    return marks + _tag("circle", _tag("title", hover), cx=float(scale(row["delta"])), cy=float(y), r=4.0, class_=kind)


def _backdrop(scale: Callable[[float], float], margin: float | None, top: float, bottom: float) -> Markup:
    """The zero line, on the band of effects that count as none."""
    band = Markup("")
    if margin is not None:
        band = _box(scale(-margin), top, scale(margin) - scale(-margin), bottom - top, class_="margin")
    return band + _line(scale(0), top, scale(0), bottom, "zero")


def forest(
    rows: Sequence[Mapping[str, Any]], margin: float | None, metric: str, width: int, names: Sequence[str] = ()
) -> Markup:
    labels = list(names) or [row["label"] for row in rows]
    labels = [
        f"{label} ({', '.join(row['marks'])})" if row["marks"] else label
        for label, row in zip(labels, rows, strict=True)
    ]
    # A narrow picture leaves the intervals to the table, so that labels stay whole.
    place = _Rows(width, labels, [_effect(row) if width == WIDE else change(row) for row in rows])
    low, high = _extent(rows, margin)
    scale = place.scale(low, high)
    marks = Markup("").join(
        _effect_marks(row, scale, place.middle(i), f"{labels[i]}: {_effect(row)}") for i, row in enumerate(rows)
    )
    axis = place.axis(scale, _ticks(low, high, 4 if place.is_narrow else 7), lambda tick: f"{tick:.4g}")
    title = _text(
        (place.left + place.right) / 2,
        place.bottom + 30,
        f"change of {metric}{in_nats(metric, ', nats')}",
        "tick",
        "middle",
    )
    label = _summary(f"Change of {metric}{in_nats(metric)} with 95 % interval", labels, [_effect(row) for row in rows])
    backdrop = _backdrop(scale, margin, place.top, place.bottom)
    return _svg(width, place.bottom + 36, label, axis, backdrop, marks, place.words(), title)


def forests_alone(
    labels: Sequence[str],
    ids: Sequence[str],
    cells: Mapping[tuple[str, str], Mapping[str, Any]],
    margin: float | None,
    metric: str,
) -> list[dict[str, Any]]:
    """Effects of each controller alone: wide, interventions side by side on common rows; narrow, one below another."""
    wide = [labels[i : i + PANELS] for i in range(0, len(labels), PANELS)]
    drawings: list[dict[str, Any]] = [
        {"title": None, "picture": _panels(part, ids, cells, margin, metric)} for part in wide
    ]
    for label in labels:
        present = [name for name in ids if (label, name) in cells]
        if present:
            picture = forest([cells[label, name] for name in present], margin, metric, NARROW, present)
            drawings.append({"title": label, "picture": picture})
    return drawings


def _panels(
    labels: Sequence[str],
    ids: Sequence[str],
    cells: Mapping[tuple[str, str], Mapping[str, Any]],
    margin: float | None,
    metric: str,
) -> Markup:
    marks = [sorted({m for k in labels for m in cells.get((k, name), {}).get("marks", ())}) for name in ids]
    names = [f"{name} ({', '.join(found)})" if found else name for name, found in zip(ids, marks, strict=True)]
    place = _Rows(WIDE, names, [""] * len(ids), top=40.0, height=18.0)
    room = (WIDE - 4 - place.left) / len(labels)
    drawn = Markup("").join(_line(2, place.middle(i) + 9, WIDE, place.middle(i) + 9, "grid") for i in range(len(ids)))
    for column, label in enumerate(labels):
        rows = [(i, cells[label, name]) for i, name in enumerate(ids) if (label, name) in cells]
        low, high = _extent([row for _, row in rows], margin)
        start = place.left + column * room
        scale = _linear(low, high, start + 10, start + room - 14)
        name, _, level = label.partition(":")
        drawn += _text(start + room / 2, 14, _short(name, room), "head", "middle")
        drawn += _text(start + room / 2, 30, _short(level, room), "label", "middle")
        drawn += _box(start + 4, place.top, room - 8, place.bottom - place.top, class_="frame")
        ticks = _ticks(low, high, 3)
        for tick in ticks:
            drawn += _line(scale(tick), place.bottom, scale(tick), place.bottom + 4, "whisker")
            if tick in (ticks[0], 0.0, ticks[-1]):  # more would touch each other
                drawn += _text(scale(tick), place.bottom + 16, f"{tick:.4g}", "tick", "middle")
        drawn += _backdrop(scale, margin, place.top, place.bottom)
        for i, row in rows:
            drawn += _effect_marks(row, scale, place.middle(i), f"{ids[i]}, {label}: {_effect(row)}")
    title = _text(
        (place.left + WIDE) / 2, place.bottom + 34, f"change of {metric}{in_nats(metric, ', nats')}", "tick", "middle"
    )
    what = f"Change of {metric}{in_nats(metric)} with 95 % interval"
    label = f"{what} for {len(ids)} controllers alone, by {', '.join(labels)}"
    return _svg(
        WIDE, place.bottom + 40, f"{label}; the numbers are in the table that follows", drawn, place.words(), title
    )


def in_nats(metric: str, words: str = " in nats") -> str:
    """The unit of fxaudit's own metrics; that of a user's is not known."""
    return words if metric in ("nll", "cross-entropy", "kl") else ""


def _linear(low: float, high: float, left: float, right: float) -> Callable[[float], float]:
    return lambda value: left + (value - low) / (high - low) * (right - left)


def execution_bars(forms: Mapping[str, Mapping[str, Any]], width: int) -> Markup:
    """FLOPs and executed nodes for each form, side by side in height; a whisker where inputs differ."""
    top, drawn, said = 0.0, Markup(""), []
    for heading, key in (("FLOPs for one input", "flops"), ("executed nodes", "executed_nodes")):
        values = [form[key] for form in forms.values()]
        written = [spread(v) for v in values]
        # Both halves leave the same room for values, so that their bars start and end on the same lines.
        longest = max(len(spread(form[k])) for form in forms.values() for k in ("flops", "executed_nodes"))
        place = _Rows(width, list(forms), [text.rjust(longest, "\u2007") for text in written], top + 26)
        largest = max((max(v) for v in values if v), default=0) or 1
        scale = place.scale(0.0, float(largest))
        drawn += _text(2, top + 16, heading, "head")
        for i, per_input in enumerate(values):
            if per_input:
                y, mean = place.middle(i), sum(per_input) / len(per_input)
                drawn += _box(place.left, y - 6, scale(mean) - place.left, 12, class_="bar")
                if min(per_input) != max(per_input):
                    drawn += _line(scale(min(per_input)), y, scale(max(per_input)), y, "whisker")
        drawn += _line(place.left, place.top, place.left, place.bottom, "zero") + place.words()
        said.append(_summary(heading, list(forms), written))
        top = place.bottom + 6
    return _svg(width, top + 4, ". ".join(said), drawn)
