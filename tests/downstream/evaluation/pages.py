"""Reports read strictly: tags are closed, nothing is loaded or run, every coordinate is a number."""

import base64
import html
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

SVG = "data:image/svg+xml;base64,"


class Strict(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert not {"href", "srcset", "onload", "onerror"} & given.keys()
        assert given.get("src", "data:image/").startswith("data:image/")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(page):
    """Checks a page and what is drawn in it."""
    assert len(page) < 1_500_000
    for forbidden in ("http", "//cdn", "url(", "@import", "<link", "<iframe", "<script"):
        assert forbidden not in page
    reader = Strict()
    reader.feed(page)
    assert reader.open == []
    for svg in re.findall(f'src="{re.escape(SVG)}(.*?)"', page):
        check_chart(ElementTree.fromstring(base64.b64decode(svg)))


def check_chart(chart):
    for node in chart.iter():
        assert not node.tag.endswith("}script")
        for name in ("d", "x", "y", "transform"):
            assert not re.search(r"nan|inf", node.get(name, "")), name
        link = node.get("{http://www.w3.org/1999/xlink}href", "#")
        assert link.startswith(("#", "data:image/png"))


def words(page):
    """What a page says; of each picture its title, and what is written there apart from numbers."""
    check(page)
    text = re.sub("<style.*?</style>", "", page, flags=re.S)
    text = re.sub(r'<img alt="" src="(.*?)".*?>', written, text)
    return html.unescape(re.sub(r"(\s*<[^>]+>\s*)+", "\n", text))


def written(image):
    said = ["picture"]
    if image[1].startswith(SVG):
        chart = ElementTree.fromstring(base64.b64decode(image[1].removeprefix(SVG)))
        texts = [node.text or "" for node in chart.iter("{http://www.w3.org/2000/svg}text")]
        said += [html.escape(text) for text in texts if re.search("[a-z]", text)]
    return "; ".join(said)
