"""Draw the wings of the package by layer, from its imports and the layers in pyproject.toml."""

import ast
import sys
import tomllib
from html import escape
from pathlib import Path

ROOT = Path("src/operations")
PICTURE = Path("docs/pictures/layers.svg")

WIDTH, ROW, HEIGHT = 960, 66, 32
STYLE = """
  .box { fill: #eef2ff; stroke: #6478c8; rx: 6 }
  text { font: 13px system-ui, sans-serif; fill: #1c2340; text-anchor: middle; dominant-baseline: central }
  path { fill: none; stroke: #6478c8; stroke-opacity: 0.3 }
  @media (prefers-color-scheme: dark) {
    .box { fill: #232a45; stroke: #8fa0e8 } text { fill: #e6e9f8 } path { stroke: #8fa0e8 }
  }
"""


def layers() -> list[list[str]]:
    """Return the wings of each layer, the topmost first."""
    config = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    (found,) = (each for each in contracts if each.get("containers") == ["operations"])
    return [row.split(" | ") for row in found["layers"] if row != "__main__"]


def imports() -> set[tuple[str, str]]:
    """Return the pairs of wings of which the first imports the second."""
    pairs: set[tuple[str, str]] = set()
    for path in ROOT.rglob("*.py"):
        wing = path.relative_to(ROOT).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("operations."):
                pairs.add((wing, str(node.module).split(".")[1]))
    return {(one, other) for one, other in pairs if one != other}


def drawing() -> str:
    """Return the picture."""
    rows = layers()
    place: dict[str, tuple[float, float, float]] = {}
    for number, row in enumerate(rows):
        for turn, wing in enumerate(row, 1):
            width = 9.0 * len(wing) + 40
            place[wing] = WIDTH * turn / (len(row) + 1) - width / 2, number * ROW + 12, width
    arrows = {pair for pair in imports() if place.keys() >= {*pair}}
    lines: list[str] = []
    for one, other in sorted(arrows):
        (x, y, width), (to_x, to_y, to_width) = place[one], place[other]
        if y >= to_y:
            sys.exit(f"{one} imports {other}, which is not below it")
        start, end, below = x + width / 2, to_x + to_width / 2, y + HEIGHT
        bend = (to_y - below) / 2
        lines.append(
            f'  <path d="M{start:.0f} {below:.0f} C{start:.0f} {below + bend:.0f} {end:.0f} {to_y - bend:.0f} '
            f'{end:.0f} {to_y:.0f}"/>'
        )
    for wing, (x, y, width) in place.items():
        used = sorted(other for one, other in arrows if one == wing)
        title = f"{wing} imports {', '.join(used) or 'no other wing'}"
        lines.append(
            f'  <g><title>{escape(title)}</title><rect class="box" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" '
            f'height="{HEIGHT}"/><text x="{x + width / 2:.0f}" y="{y + HEIGHT / 2:.0f}">{wing}</text></g>'
        )
    height = len(rows) * ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="The layers of the package: imports point only downwards">\n<style>{STYLE}</style>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def main() -> None:
    """Draw the picture, or compare it."""
    drawn = drawing()
    if "--check" in sys.argv:
        if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != drawn:
            sys.exit("docs/pictures/layers.svg is out of date: run scripts/layers")
        return
    PICTURE.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
