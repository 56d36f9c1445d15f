"""The report in a browser that nobody sees: what people do with it works."""

import io
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from jaxspec.evaluation.report import write_report
from jaxspec.evaluation.scores import write_scores
from jaxspec.methods import MuLo
from tests import runs

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    of = runs.prompts(6)
    first = runs.made(folder / "ar", of=of, images=2)
    second = runs.made(
        folder / "mulo",
        MuLo(),
        of=of,
        images=2,
        cells=runs.rows,
        drafted=10,
        failed={("p1", 0): "FloatingPointError: pass 3"},
        missing=[("p3", 1)],
    )
    write_scores(first, [runs.score("R@5", {"p0/0": 0.5})])
    write_scores(second, [runs.score("R@5", {"p0/0": 0.4})])
    write_report([first, second], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # Containers have no user namespaces; the page is ours.
        yield playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )


@pytest.fixture
def page(browser, report, request):
    """The page; whatever it says on the console is an error."""
    settings = getattr(request, "param", {})
    context = browser.new_context(
        **{"viewport": {"width": 1200, "height": 900}} | settings
    )
    opened, said, asked = context.new_page(), [], []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(report.as_uri())
    yield opened
    context.close()
    assert said == []
    assert {url.partition(":")[0] for url in asked} <= {"file", "data"}


def pixels(canvas):
    """What stands on a canvas, uint8 [H, W, 3]."""
    return np.asarray(Image.open(io.BytesIO(canvas.screenshot())).convert("RGB"))


def test_slider_steps_through_the_passes(page):
    page.locator(".prompt").first.locator("button.tile").first.click()
    canvases = page.locator("#stages canvas")
    expect(canvases).to_have_count(2)
    captions = page.locator("#stages figcaption")
    expect(captions.nth(0)).to_contain_text("16 of 16 cells")
    slider = page.locator("#pass")
    slider.fill("3")
    expect(page.locator("#pass-label")).to_have_text("Pass 3 of 15")
    expect(captions.nth(0)).to_contain_text("4 of 16 cells: 4 drawn")
    expect(captions.nth(1)).to_contain_text(
        "16 of 16 cells: 8 accepted, 4 resampled, 4 bonus; 1 island, done in pass 3"
    )
    assert "AR: 4 of 16 cells" in slider.get_attribute("aria-valuetext")
    # Three of four rows are not there yet, and one colour.
    cells = pixels(canvases.nth(0))
    side = cells.shape[0]
    below = cells[side // 4 + 20 :]
    assert (below == below[-1, -1]).mean() > 0.99
    page.keyboard.press("ArrowRight")
    expect(page.locator("#pass-label")).to_have_text("Pass 4 of 15")
    page.keyboard.press("End")
    expect(captions.nth(0)).to_contain_text("16 of 16 cells")
    page.keyboard.press("n")  # no outline
    cells = pixels(canvases.nth(0))
    middle = cells[side // 8 :: side // 4, side // 8 :: side // 4][:4, :4]
    expected = runs.picture(0, 0)[4::8, 4::8]
    np.testing.assert_allclose(middle.astype(int), expected.astype(int), atol=3)


def test_cells_show_where_they_came_from_and_islands(page):
    page.locator(".prompt").first.locator("button.tile").nth(1).click()
    canvas = page.locator("#stages canvas").nth(1)
    plain = pixels(canvas)
    page.keyboard.press("o")
    expect(page.locator("#legend")).to_contain_text("resampled")
    origin = pixels(canvas)
    side = origin.shape[0]
    assert (origin != plain).any(-1).mean() > 0.9
    column = origin[side // 8 :: side // 4, side // 8].astype(int)
    assert (column[:, 1] > column[:, 0]).all()  # accepted is green
    page.keyboard.press("i")
    islands = pixels(canvas)
    changed = np.flatnonzero((islands != origin).any((0, 2)))
    assert changed.min() > 0.48 * side  # the columns at the right, and their outline
    page.keyboard.press("o")
    expect(page.locator("#legend")).to_contain_text("pass 0 to 15")
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()


def test_filters_filter(page):
    shown = page.locator(".prompt:not([hidden])")
    expect(shown).to_have_count(12)
    page.keyboard.press("/")
    page.keyboard.type("number 3")
    expect(shown).to_have_count(2)
    expect(page.locator("#shown")).to_have_text("2 of 12 shown")
    page.get_by_label("Image").select_option("1")
    expect(shown).to_have_count(1)
    expect(shown.locator(".gap")).to_have_text("missing")
    page.get_by_label("Prompt contains").fill("")
    page.get_by_label("Category").select_option("animal")
    expect(shown).to_have_count(3)
    page.get_by_role("checkbox", name="AR").uncheck()
    expect(shown.first.locator(".tile:not([hidden])")).to_have_count(1)
    page.get_by_label("Category").select_option("")
    page.get_by_label("Image").select_option("0")
    expect(shown.locator(".gap.failed")).to_have_text(
        "failed: FloatingPointError: pass 3"
    )
    # The viewer walks through what is shown.
    shown.first.locator("button.tile:not([hidden])").click()
    expect(page.locator("#viewer-about")).to_contain_text("1 of 6")
    page.keyboard.press("j")
    expect(page.locator("#viewer-about")).to_contain_text("2 of 6")


def test_keys_reach_every_picture(page):
    page.locator("h1").click()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("#viewer-head")).to_have_text("a animal with number 0")
    expect(page.locator("#pass")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()


def test_what_is_seen_has_words(page):
    """What a screen reader is told: names of controls, pictures and plots."""
    unnamed = page.evaluate(
        """() => ["button", "input", "select", "img", "canvas", "svg"]
        .flatMap((kind) => [...document.querySelectorAll(kind)])
        .filter((node) => node.checkVisibility())
        .filter((node) => !(node.alt || node.ariaLabel || node.labels?.length
            || node.textContent.trim()))
        .map((node) => node.outerHTML.slice(0, 90))"""
    )
    assert unnamed == []
    plot = page.locator("#plot svg")
    label = plot.get_attribute("aria-label")
    assert label.startswith("R@5 against passes a picture: AR, 16 [16, 16] passes, 0.5")
    expect(plot.locator("circle")).to_have_count(1)  # exact
    expect(plot.locator(".biased rect")).to_have_count(1)
    assert page.locator("html").get_attribute("lang") == "en"


PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}


@pytest.mark.parametrize(
    "page",
    [{"color_scheme": "light"}, {"color_scheme": "dark"}, PHONE],
    ids=["light", "dark", "phone"],
    indirect=True,
)
def test_screenshot_is_sane(page, request):
    picture = page.locator(".prompt img").first
    picture.scroll_into_view_if_needed()
    expect(picture).to_have_attribute("src", re.compile("^data:"))  # it was near enough
    picture.evaluate("node => node.decode()")
    shot = page.screenshot(full_page=True)
    image = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB"))
    colours, counts = np.unique(image.reshape(-1, 3), axis=0, return_counts=True)
    assert len(colours) > 200
    ground = colours[counts.argmax()].mean()
    assert ground < 40 if "dark" in request.node.name else ground > 240
    # Nothing sticks out at the side.
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide == page.viewport_size["width"]
