"""Cleaning of captions, as the models of LlamaGen saw them in training.

The published code (T5Embedder, after DeepFloyd IF and PixArt) lowers letters and drops
what captions of web pages are full of: addresses, file names, numbers of articles,
calls to download. The rules here do the same on captions that people write; they do not
mend text of a wrong encoding, and drop addresses as a whole.
"""

import html
import re
import unicodedata
from urllib.parse import unquote_plus

_DOMAIN = r"[\w.-]+\.(?:com|co|ru|net|org|edu|gov|it)\b(?![\w@])(?:/\S*)?"
_SUFFIX = r"(?:png|jpe?g|bmp|webp|eps|pdf|apk|mp4)"


def _compiled(*rules: tuple[str, str]) -> list[tuple[re.Pattern, str]]:
    return [(re.compile(pattern), new) for pattern, new in rules]


# In this order: what to look for, and what takes its place.
_PAGES = _compiled(
    (r"<person>", "person"),
    (rf"\b(?:https?://\S+|www\.\S+|{_DOMAIN})", ""),
    (r"<[a-z/!][^>]*>", ""),  # HTML
)
_SIGNS = _compiled(
    (r"@\w+", ""),  # names of people
    (r"[\u31c0-\u9fff]+", ""),  # Chinese and Japanese
    (r"[`´«»“”¨]", '"'),
    (r"[‘’]", "'"),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),  # addresses of machines
    (r"\d:\d\d\s+$", ""),  # the time at the end of an article
    (r"\\n", " "),
    (r"#(?:\d{1,3}|\d{5,})\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.{_SUFFIX}", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_PHRASES = _compiled(
    # Numbers of articles: jc6640, jc6640vc, 6640vc231.
    (r"\b[a-z]{1,3}\d{3,15}\b", ""),
    (r"\b[a-z]+\d+[a-z]+\b", ""),
    (r"\b\d+[a-z]+\d+\b", ""),
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{_SUFFIX}(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-z]+\d+[a-z]+\d+[a-z\d]*\b", " "),
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # sizes; the second is Cyrillic
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"'](.+)[\"']$", r"\1"),  # all of it quoted
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)


def clean_caption(caption: str) -> tuple[str, list[str]]:
    """The caption as the models read captions, and the words that were dropped."""
    text = _cleaned(_cleaned(caption))  # twice, as published
    kept, words = set(_words(text)), _words(html.unescape(caption.lower()))
    return text, [word for word in words if word not in kept]


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"\w+", text)))


def _cleaned(caption: str) -> str:
    text = unquote_plus(caption).strip().lower()
    text = html.unescape(_replaced(text, _PAGES))
    text = _replaced("".join(map(_plain_dash, text)), _SIGNS)
    if len(re.findall(r"[-_]", text)) > 3:  # this-is-my-cat
        text = re.sub(r"[-_]", " ", text)
    return _replaced(text.strip(), _PHRASES).strip()


def _replaced(text: str, rules: list[tuple[re.Pattern, str]]) -> str:
    for pattern, new in rules:
        text = pattern.sub(new, text)
    return text


def _plain_dash(letter: str) -> str:
    return "-" if unicodedata.category(letter) == "Pd" else letter
