"""A layered drawing of a flow as SVG, made here: no network, no Graphviz.

The method is Sugiyama's: edges that go back are turned round, stages get the layer of their longest way from the
start, long edges get a place in every layer they cross, layers are ordered by the medians of their neighbours until
crossings stop becoming fewer, and places are moved towards their neighbours as far as their distance allows. Labels
have layers of their own between those of the stages, so that nothing lies on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from ._edges import END, Edge, Graph, Stage

__all__ = ["picture"]

BEGIN = "\0begin"
_GAP_X = 28.0
_GAP_Y = 26.0
_MARGIN = 24.0
_PASSES = 24
_NODE_HEIGHT = 44.0
_LINE = 14.0
_NODE_CHAR = 8.2
_LABEL_CHAR = 6.1

_STYLE = """
  .stage { fill: #ffffff; stroke: #3b6ea5; stroke-width: 1.5 }
  .logic { fill: #fdf6e3; stroke: #b58900 }
  .end { fill: #eef7ee; stroke: #4b8b4b }
  .dot { fill: #3b6ea5 }
  .ring { fill: none; stroke: #4b8b4b; stroke-width: 1.5 }
  .edge { fill: none; stroke: #60758a; stroke-width: 1.4 }
  .direct { stroke-dasharray: 5 4 }
  .head { fill: #60758a }
  text { font: 600 14px system-ui, sans-serif; fill: #1d2b38; text-anchor: middle }
  .small { font: 11px system-ui, sans-serif; fill: #5a6b7b }
  .note { font: 11px system-ui, sans-serif; fill: #5a6b7b; text-anchor: start }
  .back { fill: #fbfcfd }
  @media (prefers-color-scheme: dark) {
    .back { fill: #14191f } text { fill: #e6edf3 } .small, .note { fill: #9fb0c0 }
    .stage { fill: #1b2733 } .logic { fill: #2e2a1a } .end { fill: #1a2b1e }
    .edge { stroke: #8fa3b5 } .head { fill: #8fa3b5 }
  }
"""


@dataclass(eq=False)
class _Place:
    """A box in a layer: a stage, a label, or the point where a long edge crosses the layer."""

    key: str
    layer: int
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    up: list[_Place] = field(default_factory=list["_Place"])
    down: list[_Place] = field(default_factory=list["_Place"])
    lines: tuple[str, ...] = ()
    stage: Stage | None = None

    @property
    def is_node(self) -> bool:
        """Whether it is more than a point on an edge's way."""
        return self.key != ""

    @property
    def half(self) -> float:
        """From the middle to where edges begin and end."""
        return (_NODE_HEIGHT if self.stage else self.height) / 2


@dataclass(eq=False)
class _Route:
    """An edge with the places on its way, from the upper to the lower end."""

    edge: Edge
    places: list[_Place]
    turned: bool


def picture(graph: Graph) -> str:
    """Draw a graph.

    Args:
        graph: The graph.

    Returns:
        An SVG document.
    """
    return "\n".join(_Drawing(graph).svg()) + "\n"


class _Drawing:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.loops = [edge for edge in graph.edges if edge.source == edge.target]
        start = Edge(BEGIN, graph.initial, "go", ())
        edges = [start, *(edge for edge in graph.edges if edge.source != edge.target)]
        self.nodes = self._nodes(edges)
        turned = _back_edges([BEGIN, *(stage.id for stage in graph.stages)], edges)
        layers = _longest(list(self.nodes), edges, turned)
        for key, place in self.nodes.items():
            place.layer = 2 * layers[key]
        self.routes = [self._route(edge, edge in turned) for edge in edges]
        self.layers = _ordered(self._layers())
        _set_x(self.layers)
        self._set_y()

    # -- layout

    def _nodes(self, edges: Sequence[Edge]) -> dict[str, _Place]:
        nodes = {BEGIN: _Place(BEGIN, 0, 18, 18)}
        for stage in self.graph.stages:
            loops = [edge for edge in self.loops if edge.source == stage.id]
            # Room for the loops and their labels, on both sides so that the box stays in the middle.
            extra = max((_label_width(edge) for edge in loops), default=-34.0) + 34
            height = max(_NODE_HEIGHT, sum(_LINE * len(_label(edge)) + 4 for edge in loops))
            nodes[stage.id] = _Place(stage.id, 0, _node_width(stage.id) + 2 * extra, height, stage=stage)
        if any(edge.target == END for edge in edges):
            nodes[END] = _Place("\0end", 0, 22, 22)
        return nodes

    def _route(self, edge: Edge, turned: bool) -> _Route:
        upper, lower = self.nodes[edge.source], self.nodes[edge.target]
        if turned:
            upper, lower = lower, upper
        places = [upper]
        for layer in range(upper.layer + 1, lower.layer):
            labelled = layer == (upper.layer + lower.layer) // 2 // 2 * 2 + 1 if edge.via else False
            lines = _label(edge) if labelled else ()
            place = _Place("", layer, _label_width(edge) if labelled else 6.0, _LINE * len(lines), lines=lines)
            places.append(place)
        places.append(lower)
        for one, two in pairwise(places):
            one.down.append(two)
            two.up.append(one)
        return _Route(edge, places, turned)

    def _layers(self) -> list[list[_Place]]:
        """Places by layer, in the order in which a walk from the start meets them."""
        layers: list[list[_Place]] = [[] for _ in range(max(place.layer for place in self.nodes.values()) + 1)]
        seen: set[_Place] = set()
        for first in self.nodes.values():
            waiting = [first]
            while waiting:
                place = waiting.pop()
                if place not in seen:
                    seen.add(place)
                    layers[place.layer].append(place)
                    waiting += reversed(place.down)
        return layers

    def _set_y(self) -> None:
        top = _MARGIN
        for layer in self.layers:
            height = max(place.height for place in layer)
            for place in layer:
                place.y = top + height / 2
            top += height + _GAP_Y
        left = min(place.x - place.width / 2 for layer in self.layers for place in layer)
        for layer in self.layers:
            for place in layer:
                place.x += _MARGIN - left
        self.height = top - _GAP_Y + _MARGIN
        self.width = max(place.x + place.width / 2 for layer in self.layers for place in layer) + _MARGIN

    # -- output

    def svg(self) -> Iterator[str]:
        notes = [f"{self.graph.flow}. Edges are read from the code of the steps."]
        if any(edge.kind == "direct_to" for edge in self.graph.edges):
            notes.append("Dashed: answers from code, the stage gets the next turn.")
        notes += [f"Not drawn, because the target is computed: {place}" for place in self.graph.computed]
        width = max(self.width, max(map(len, notes)) * _LABEL_CHAR + 2 * _MARGIN)
        height = self.height + 16 * len(notes) + 8
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
        )
        yield f"<title>{escape(self.graph.flow)}</title>"
        yield f"<desc>{escape(' '.join(notes))}</desc>"
        yield f"<style>{_STYLE}</style>"
        yield '<rect class="back" width="100%" height="100%"/>'
        ports = self._ports()
        for route in self.routes:
            yield from self._edge(route, ports)
        for place in self.nodes.values():
            yield from self._loops(place)
        # Labels lie over all lines, so that each can be read.
        for place in (one for layer in self.layers for one in layer if one.lines):
            yield from _text(place.x, place.y, place.lines, place.width)
        for place in self.nodes.values():
            yield from self._node(place)
        for number, note in enumerate(notes):
            yield f'<text class="note" x="{_MARGIN:.0f}" y="{self.height + 16 * number + 8:.0f}">{escape(note)}</text>'
        yield "</svg>"

    def _ports(self) -> dict[tuple[_Route, int], float]:
        """Where each edge meets its two stages: side by side, in the order in which they come."""
        ends: dict[tuple[_Place, int], list[tuple[float, int, _Route]]] = defaultdict(list)
        for number, route in enumerate(self.routes):
            ends[route.places[0], 0].append((route.places[1].x, number, route))
            ends[route.places[-1], 1].append((route.places[-2].x, number, route))
        found: dict[tuple[_Route, int], float] = {}
        for (place, end), routes in ends.items():
            room = min(18.0, (_node_width(place.key) - 24) / max(1, len(routes) - 1)) if place.stage else 0.0
            for number, (_, _, route) in enumerate(sorted(routes, key=lambda one: one[:2])):
                found[route, end] = place.x + room * (number - (len(routes) - 1) / 2)
        return found

    def _edge(self, route: _Route, ports: dict[tuple[_Route, int], float]) -> Iterator[str]:
        first, last = route.places[0], route.places[-1]
        points = [(ports[route, 0], first.y + first.half)]
        for place in route.places[1:-1]:
            half = place.height / 2
            points += [(place.x, place.y - half), (place.x, place.y + half)] if half else [(place.x, place.y)]
        points.append((ports[route, 1], last.y - last.half))
        arrow = _arrow(*points[0], down=False) if route.turned else _arrow(*points[-1], down=True)
        # The line ends where the arrow's head begins.
        at, shift = (0, 7) if route.turned else (-1, -7)
        points[at] = (points[at][0], points[at][1] + shift)
        path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
        for (x1, y1), (x2, y2) in pairwise(points):
            middle = (y1 + y2) / 2
            path += f" C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2:.1f}"
        yield f"<g {_about(route.edge)}>"
        yield f'<path class="{_edge_class(route.edge)}" d="{path}"/>'
        yield arrow
        yield "</g>"

    def _loops(self, place: _Place) -> Iterator[str]:
        """Edges from a stage to itself, at its right side, with their labels one below the other."""
        loops = [edge for edge in self.loops if edge.source == place.key]
        right = place.x + _node_width(place.key) / 2
        label = place.y - sum(_LINE * len(_label(edge)) + 4 for edge in loops) / 2 + 2
        reach = 10.0 if len(loops) == 1 else 7.0
        for number, edge in enumerate(loops):
            middle = place.y + (number - (len(loops) - 1) / 2) * 22
            top, bottom = middle - reach, middle + reach
            yield f"<g {_about(edge)}>"
            yield (
                f'<path class="{_edge_class(edge)}" d="M{right:.1f},{top:.1f} C{right + 30:.1f},{top - 8:.1f} '
                f'{right + 30:.1f},{bottom + 8:.1f} {right + 7:.1f},{bottom:.1f}"/>'
            )
            yield f'<path class="head" d="M{right:.1f},{bottom:.1f} l8,-4 l0,8 z"/>'
            lines = _label(edge)
            height = _LINE * len(lines)
            yield from _text(right + 26 + _label_width(edge) / 2, label + height / 2, lines, _label_width(edge))
            label += height + 4
            yield "</g>"

    def _node(self, place: _Place) -> Iterator[str]:
        stage = place.stage
        if stage is None:
            yield f'<circle class="dot" cx="{place.x:.1f}" cy="{place.y:.1f}" r="6"/>'
            if place.key != BEGIN:
                yield f'<circle class="ring" cx="{place.x:.1f}" cy="{place.y:.1f}" r="10"/>'
            return
        width = _node_width(place.key)
        x, y = place.x - width / 2, place.y - place.half
        kind = {"step": "stage", "logic": "stage logic", "end": "stage end"}[stage.kind]
        about = {"logic": "decides in code", "end": "closes the session"}.get(stage.kind)
        tools = f"{len(stage.tools)} tool{'s' if len(stage.tools) != 1 else ''}" if stage.tools else "no tools"
        yield f"<g data-stage={quoteattr(stage.id)}>"
        if stage.tools:
            yield f"<title>{escape(', '.join(stage.tools))}</title>"
        radius = {"step": 8, "logic": 2, "end": 22}[stage.kind]
        yield (
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_NODE_HEIGHT:.0f}" '
            f'rx="{radius}"/>'
        )
        yield f'<text x="{place.x:.1f}" y="{place.y - 2:.1f}">{escape(stage.id)}</text>'
        yield f'<text class="small" x="{place.x:.1f}" y="{place.y + 14:.1f}">{escape(about or tools)}</text>'
        yield "</g>"


def _node_width(name: str) -> float:
    return max(124.0, len(name) * _NODE_CHAR + 30)


def _about(edge: Edge) -> str:
    return f"data-from={quoteattr(edge.source.strip(chr(0)))} data-to={quoteattr(edge.target or 'end')}"


def _edge_class(edge: Edge) -> str:
    return "edge direct" if edge.kind == "direct_to" else "edge"


def _arrow(x: float, y: float, *, down: bool) -> str:
    return f'<path class="head" d="M{x:.1f},{y:.1f} l-4,{-8 if down else 8} l8,0 z"/>'


def _label(edge: Edge) -> tuple[str, ...]:
    shown = edge.via[:4]
    return (*shown, f"and {len(edge.via) - 4} more") if len(edge.via) > 4 else shown


def _label_width(edge: Edge) -> float:
    return max(map(len, _label(edge)), default=0) * _LABEL_CHAR + 8


def _text(x: float, y: float, lines: Sequence[str], width: float) -> Iterator[str]:
    """Lines of small text around a point, on ground that covers what is behind."""
    height = _LINE * len(lines)
    top = y - height / 2
    yield f'<rect class="back" x="{x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    for number, line in enumerate(lines):
        yield f'<text class="small" x="{x:.1f}" y="{top + _LINE * number + 11:.1f}">{escape(line)}</text>'


def _back_edges(nodes: Sequence[str], edges: Sequence[Edge]) -> set[Edge]:
    """Edges that lead back to where a walk in depth comes from; without them there is no circle."""
    out: dict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        out[edge.source].append(edge)
    back: set[Edge] = set()
    state: dict[str, int] = {}
    for first in nodes:
        if first in state:
            continue
        state[first] = 1
        stack = [(first, iter(out[first]))]
        while stack:
            node, rest = stack[-1]
            edge = next(rest, None)
            if edge is None:
                state[node] = 2
                stack.pop()
            elif state.get(edge.target) == 1:
                back.add(edge)
            elif edge.target not in state:
                state[edge.target] = 1
                stack.append((edge.target, iter(out[edge.target])))
    return back


def _longest(nodes: Sequence[str], edges: Sequence[Edge], turned: set[Edge]) -> dict[str, int]:
    """The layer of each stage: one below the lowest stage that leads to it."""
    pairs = [(e.target, e.source) if e in turned else (e.source, e.target) for e in edges]
    layers = dict.fromkeys(nodes, 0)
    for _ in nodes:
        for source, target in pairs:
            layers[target] = max(layers[target], layers[source] + 1)
    return layers


def _ordered(layers: list[list[_Place]]) -> list[list[_Place]]:
    """Order every layer for few crossings."""
    best, fewest = [list(layer) for layer in layers], _crossings(layers)
    for turn in range(_PASSES):
        down = turn % 2 == 0
        for layer in layers if down else reversed(layers):
            position = {place: at for one in layers for at, place in enumerate(one)}
            middle = {place: _median([position[n] for n in (place.up if down else place.down)]) for place in layer}
            layer.sort(key=lambda p: position[p] if (m := middle[p]) is None else m)
        crossings = _crossings(layers)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _median(values: list[int]) -> float | None:
    if not values:
        return None
    values.sort()
    half = len(values) // 2
    return float(values[half]) if len(values) % 2 else (values[half - 1] + values[half]) / 2


def _crossings(layers: Sequence[Sequence[_Place]]) -> int:
    total = 0
    for upper, lower in pairwise(layers):
        position = {place: at for at, place in enumerate(lower)}
        ends = [position[to] for place in upper for to in sorted(place.down, key=lambda p: position[p])]
        total += sum(one > two for at, one in enumerate(ends) for two in ends[at + 1 :])
    return total


def _set_x(layers: Sequence[Sequence[_Place]]) -> None:
    """Move places towards their neighbours, as far as order and distance allow."""
    for layer in layers:
        at = 0.0
        for place in layer:
            place.x = at + place.width / 2
            at += place.width + _GAP_X
    for turn in range(_PASSES):
        down = turn % 2 == 0
        for layer in layers if down else reversed(layers):
            wish: list[float] = []
            for place in layer:
                near = place.up if down else place.down
                near = near or place.up or place.down
                wish.append(sum(n.x for n in near) / len(near) if near else place.x)
            _spread(layer, wish)


def _spread(layer: Sequence[_Place], wish: Sequence[float]) -> None:
    """Set every x as near to its wish as possible (least squares) without places lying on each other.

    Distances are taken out first; then neighbours in the wrong order are pooled at the mean of their wishes, with the
    places that only lead an edge on counting more, so that long edges become straight.
    """
    offsets: list[float] = []
    at = 0.0
    for number, place in enumerate(layer):
        if number:
            at += layer[number - 1].width / 2 + _GAP_X + place.width / 2
        offsets.append(at)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, members
    for place, target, offset in zip(layer, wish, offsets, strict=True):
        mean, weight, members = target - offset, 1.0 if place.is_node else 3.0, 1
        while blocks and blocks[-1][0] > mean:
            before, heavy, count = blocks.pop()
            mean = (before * heavy + mean * weight) / (heavy + weight)
            weight += heavy
            members += count
        blocks.append((mean, weight, members))
    index = 0
    for mean, _, members in blocks:
        for _ in range(members):
            layer[index].x = mean + offsets[index]
            index += 1
