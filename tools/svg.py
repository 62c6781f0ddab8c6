"""The few SVG shapes that the documentation's drawings are made of."""

from __future__ import annotations

from html import escape

WIDTH = 420  # units; a phone shows the whole width, so text stays legible at 12 units
INK = "#1f2937"
FILLS = {
    "key": "#dbeafe",
    "value": "#fde68a",
    "scale": "#bbf7d0",
    "free": "#f3f4f6",
    "state": "#fbcfe8",
    "plain": "#ffffff",
}


class Drawing:
    """Shapes on a white sheet, so that it reads on a dark page too.

    Args:
        height: units.
        title: what it shows, for readers who do not see it.
    """

    def __init__(self, height: int, title: str) -> None:
        self._height, self._title = height, title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, label: str = "", fill: str = "plain") -> None:
        """A rectangle with a label in its middle."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{FILLS[fill]}" stroke="{INK}"/>'
        )
        if label:
            self.text(x + w / 2, y + h / 2 + 4, label, anchor="middle")

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False) -> None:
        """A line of text; y is its base line."""
        weight = ' font-weight="bold"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, arrow: bool = False) -> None:
        """A straight line, with a head at its end where asked for."""
        head = ' marker-end="url(#head)"' if arrow else ""
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self._shapes.append(f'<line {ends} stroke="{INK}"{head}/>')

    def svg(self) -> str:
        """The file's text."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
                f'width="{WIDTH * 3 // 2}" role="img" font-family="sans-serif" font-size="12" fill="{INK}">',
                f"<title>{escape(self._title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" '
                'markerWidth="7" markerHeight="7" '
                f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
                f'<rect width="{WIDTH}" height="{self._height}" rx="6" fill="#ffffff"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )
