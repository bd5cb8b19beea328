"""HTML and SVG as text: elements whose attributes and text are escaped, and the frame of a fragment.

A fragment is HTML that a notebook puts among its own: a `div` with a style that reaches nothing outside of it, without
scripts and without anything that is loaded from elsewhere. Text and lines have the color of what surrounds them, so it
is readable in light and dark themes.
"""

import html
import zlib

WIDTH = 900
"""Of a fragment, in pixels: that of a notebook's cell. In less room pictures shrink."""

STYLE = """
.jaxrlhf{font:13px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;color:inherit;
max-width:900px;margin:4px 0}
.jaxrlhf *{box-sizing:border-box}
.jaxrlhf svg{display:block;max-width:100%;height:auto}
.jaxrlhf .title{font-weight:600;font-size:14px;margin:2px 0}
.jaxrlhf .note{opacity:.7;font-size:12px;margin:2px 0 6px}
.jaxrlhf .legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12px;margin:4px 0}
.jaxrlhf .legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px;vertical-align:-1px}
.jaxrlhf .wide{overflow-x:auto}
.jaxrlhf table.rows{border-collapse:collapse;border:0;font-size:12px;margin:6px 0;width:auto}
.jaxrlhf table.rows tr,.jaxrlhf table.rows tbody tr{background:transparent;border:0}
.jaxrlhf table.rows tr th,.jaxrlhf table.rows tr td{text-align:left;vertical-align:top;padding:3px 12px 3px 0;border:0;
border-bottom:1px solid rgba(128,128,128,.28);max-width:none;white-space:normal;color:inherit}
.jaxrlhf table.rows tr th{font-weight:600;opacity:.75}
.jaxrlhf table.rows tr .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.jaxrlhf table.rows .dot{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:6px}
.jaxrlhf table.rows tr td:first-child{white-space:nowrap}
.jaxrlhf .facts{display:flex;flex-wrap:wrap;gap:4px 22px;margin:6px 0}
.jaxrlhf .facts b{display:block;font-size:14px;font-weight:600;font-variant-numeric:tabular-nums}
.jaxrlhf .facts span{font-size:11px;opacity:.75}
.jaxrlhf .bars{display:flex;height:13px;background:rgba(128,128,128,.18);border-radius:2px;overflow:hidden;
min-width:40px}
.jaxrlhf .bars i{display:block;height:100%}
""".strip()
"""The style of fragments; every rule begins with their class."""


def escaped(text: object) -> str:
    """Text as it may stand between tags and in quotes."""
    return html.escape(str(text), quote=True)


def element(name: str, *inside: str, **attributes: object) -> str:
    """An element. `inside` is markup; attributes are escaped, and left out if they are None.

    >>> element("rect", element("title", escaped("a < b")), x=1.23456, stroke_width=2, class_="box")
    '<rect x="1.23" stroke-width="2" class="box"><title>a &lt; b</title></rect>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_number(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}/>" if name in _EMPTY and not inside else f"<{name}{given}>{''.join(inside)}</{name}>"


_EMPTY = ("rect", "line", "path", "circle", "polygon", "br", "input", "meta")


def label(x: float, y: float, text: object, **attributes: object) -> str:
    """Text in a picture."""
    return element("text", escaped(text), x=x, y=y, **attributes)


def svg(width: float, height: float, *inside: str, name: str, least: float = 0, **attributes: object) -> str:
    """A picture, which shrinks where there is less room, but not below a width of `least`. `name` is for those who
    cannot see it."""
    drawn = element("g", *inside, fill="currentColor", font_size=11)
    style = f"max-width:100%;height:auto{f';min-width:{least:.0f}px' if least else ''}"
    return element(
        "svg", drawn, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=width, height=height, role="img", aria_label=name, style=style, **attributes,
    )  # fmt: skip


def fragment(kind: str, *inside: str) -> str:
    """The frame of a fragment, with its style."""
    return element("div", f"<style>{STYLE}</style>", *inside, class_=f"jaxrlhf jaxrlhf-{kind}")


def legend(colors: dict[str, str]) -> str:
    """A line of names, each with its color."""
    keys = [element("span", element("i", style=f"background:{color}"), escaped(name)) for name, color in colors.items()]
    return element("div", *keys, class_="legend")


def table(columns: list[str], rows: list[list[str]], *, numbers: tuple[str, ...] = (), css: str = "rows") -> str:
    """A table of markup, with the columns `numbers` to the right."""

    def cells(kind: str, texts: list[str]) -> str:
        return "".join(
            element(kind, text, class_="n" if column in numbers else None)
            for column, text in zip(columns, texts, strict=True)
        )

    head = element("thead", element("tr", cells("th", [escaped(column) for column in columns])))
    body = element("tbody", *(element("tr", cells("td", row)) for row in rows))
    return element("div", element("table", head, body, class_=css), class_="wide")


def hatching(color: str, size: int = 5) -> tuple[str, str]:
    """A pattern of slanting lines, and what paints with it."""
    name = f"jaxrlhf-{zlib.crc32(f'{color} {size}'.encode()):08x}"
    lines = element("path", d=f"M0 {size}L{size} 0", stroke=color, stroke_width=1)
    ground = element("rect", width=size, height=size, fill=color, fill_opacity=0.22)
    pattern = element("pattern", ground, lines, id=name, width=size, height=size, patternUnits="userSpaceOnUse")
    return element("defs", pattern), f"url(#{name})"


def ink(background: str) -> str:
    """Black or white: what is readable on a color such as '#3182bd'."""
    red, green, blue = (int(background[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#111111" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.3 else "#ffffff"


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters, with an ellipsis where some are left out."""
    return text if len(text) <= most else f"{text[: max(1, most - 1)]}…"


def _number(value: object) -> str:
    """A value of an attribute; numbers have at most two decimals."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escaped(value)
