"""The page in headless Chromium: curves, a live update, keyboard, themes, widths, names.

Playwright's own browser (`uv run playwright install chromium`) or one of the system is taken.
"""

import json
import shutil

import pytest
from page_cases import ROW, make_run, served, train_rows, write_rows
from playwright import sync_api
from test_page_chat import fake_server
from test_page_model_server import stand_in

from jaxtrain.runs.compare import main as compare_main
from jaxtrain.runs.page import model_server
from jaxtrain.runs.page.app import page_app
from jaxtrain.runs.page.endpoint import endpoint_at

HOSTILE = '<img src=x onerror="window.hacked=1">'
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VIEWS = ("curves", "compare", "samples", "details", "estimate", "chat")


@pytest.fixture(scope="module")
def browser():
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    with sync_api.sync_playwright() as playwright:
        try:
            made = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser: playwright install chromium ({str(error).splitlines()[0]})")
        yield made
        made.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """(folder of runs, URL) of a page that is served, with something to chat with."""
    folder = tmp_path_factory.mktemp("site") / "runs"
    make_run(folder, "first")
    make_run(folder, "second", steps=60, end=None, floor=1.5, lr=0.02)
    with served(fake_server()) as chat, served(page_app(folder, [endpoint_at(chat)])) as url:
        yield folder, url


@pytest.fixture
def opened(browser, site):
    """(address after the #, width, theme) -> the page; it fails for what a page must not do."""
    faults, contexts = [], []

    def open_page(address="", width=1300, theme="light", url=site[1]):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, offline="file:" in url
        )
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda m: faults.append(m.text) if is_fault(m) else None)
        page.on("request", lambda r: None if r.url.startswith(url) else faults.append(r.url))
        page.goto(f"{url}#{address}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def is_fault(message):
    """Of the console; a form that is refused is none."""
    return message.type == "error" and "status of 400" not in message.text


def points(page, measure):
    """Of all lines of a chart; waits for the chart."""
    plot = page.locator(f'figure[data-measure="{measure}"] .plot[data-points]')
    plot.wait_for()
    return int(plot.get_attribute("data-points"))


def drawn(page, measure):
    """Share of the chart's pixels that are coloured, as lines of runs are."""
    return page.evaluate(
        """(measure) => {
          const canvas = document.querySelector(`figure[data-measure="${measure}"] canvas`);
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          let count = 0;
          for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] > 100 && Math.max(data[i], data[i + 1], data[i + 2])
              - Math.min(data[i], data[i + 1], data[i + 2]) > 60) count += 1;
          return (4 * count) / data.length;
        }""",
        measure,
    )


def test_curves_appear_and_a_live_row_arrives(opened, site):
    folder, _ = site
    make_run(folder, "live", steps=60, end=None, total=200)
    page = opened("run=live")
    assert points(page, "train-loss") == 6 and points(page, "validation-bpb") == 1
    assert drawn(page, "train-loss") > 0.001
    write_rows(folder / "live", [ROW | {"step": 70, "time": 7.0, "tokens": 7000}], "a")
    page.locator('figure[data-measure="train-loss"] .plot[data-points="7"]').wait_for()
    page.get_by_text("70/200 steps").wait_for()
    kept = (folder / "live" / "metrics.jsonl").read_text().splitlines(keepends=True)[:5]
    (folder / "live" / "metrics.jsonl").write_text("".join(kept))  # back to a checkpoint
    page.locator('figure[data-measure="train-loss"] .plot[data-points="4"]').wait_for()
    shutil.rmtree(folder / "live")
    page.locator("#runs li", has_text="live").wait_for(state="detached")


@pytest.mark.slow
def test_the_first_run_of_a_folder_appears_by_itself(opened, tmp_path):
    with served(page_app(tmp_path)) as url:
        page = opened(url=url)
        page.get_by_text("No runs in this folder yet").wait_for()
        make_run(tmp_path, "new", steps=30, end=None)
        assert points(page, "train-loss") == 3
        page.close()


@pytest.mark.slow
def test_runs_are_laid_over_each_other_and_compared(opened):
    page = opened("run=first")
    assert points(page, "train-loss") == 10
    page.get_by_role("checkbox", name="second").check()
    page.locator('figure[data-measure="train-loss"] .plot[data-points="16"]').wait_for()
    figure = page.locator('figure[data-measure="train-loss"]')
    assert "first ends at" in (name := figure.get_attribute("aria-label")) and "second" in name
    box = figure.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    tip = figure.locator(".tip")
    tip.wait_for()
    assert "first" in tip.inner_text() and "second" in tip.inner_text()
    page.mouse.down()  # zoom to a part
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    page.mouse.up()
    show_all = page.get_by_role("button", name="Show all")
    assert show_all.is_enabled()
    show_all.click()
    assert show_all.is_disabled()
    for axis in ("tokens", "seconds"):
        page.locator("#axis").select_option(axis)
        assert axis in figure.get_attribute("aria-label")
    page.get_by_label("log x").check()
    page.get_by_label("log y").check()
    assert points(page, "train-loss") == 16 and "logY=1" in page.url
    page.get_by_role("tab", name="Compare").click()
    page.get_by_role("cell", name="0.02").wait_for()
    assert page.get_by_role("row", name="optim.learning_rate").is_visible()
    page.reload()  # the address has kept what was shown
    page.get_by_role("row", name="optim.learning_rate").wait_for()


@pytest.mark.slow
def test_the_keyboard_alone(opened):
    page = opened("run=first")
    points(page, "train-loss")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "tab":
            break
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.tab") == "compare"
    page.keyboard.press("Home")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.measure") == "train-loss":
            break
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.getElementById('live').textContent.includes('first')")
    show_all = page.get_by_role("button", name="Show all")
    page.keyboard.press("+")
    assert show_all.is_enabled()
    assert page.evaluate("document.activeElement.dataset.measure") == "train-loss"
    page.keyboard.press("0")
    assert show_all.is_disabled()
    page.get_by_role("checkbox", name="first").focus()
    page.keyboard.press("Space")
    page.get_by_text("Choose one or more runs that have trained").wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.quick("light")
def test_every_view_is_no_wider_than_the_window_and_has_names(opened, theme):
    page = opened("run=first&run=second", width=400, theme=theme)
    points(page, "train-loss")
    for view in VIEWS:
        page.locator(f'[role=tab][data-tab="{view}"]').click()
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea, a, meter,"
              + " progress, [role=tab], [role=tabpanel], [role=region], [role=log]")]
              .filter((one) => !one.hidden && !(one.labels?.length || one.textContent.trim()
                || one.getAttribute("aria-label") || one.getAttribute("aria-labelledby")))
              .map((one) => one.outerHTML)"""
        )
        assert nameless == [], view
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(15, 18, 22)") == (theme == "dark")


@pytest.mark.slow
def test_the_theme_can_be_chosen_and_is_kept(opened):
    page = opened("run=first")
    ground = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = ground()
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
    assert page.get_by_role("button", name="Theme: dark").is_visible() and ground() != light
    page.reload()
    page.get_by_role("button", name="Theme: dark").wait_for()


def test_names_and_texts_of_a_run_are_text(opened, site):
    folder, _ = site
    hostile = make_run(folder, HOSTILE.replace("/", ""), end=f"failed: {HOSTILE}")
    (hostile / "samples" / "step_000050.txt").write_text(HOSTILE)
    (hostile / "data.json").write_text(json.dumps({HOSTILE: {"tokens": 1, "documents": 1}}))
    try:
        page = opened()
        page.get_by_role("checkbox", name=HOSTILE).check()
        page.get_by_role("checkbox", name="second").check()
        for view in VIEWS:
            page.locator(f'[role=tab][data-tab="{view}"]').click()
            page.wait_for_timeout(200)
        page.get_by_role("button", name=f"Details of {HOSTILE}").click()
        page.get_by_role("cell", name=f"failed: {HOSTILE}").wait_for()
        assert page.locator("img").count() == 0 and page.evaluate("window.hacked") is None
    finally:
        shutil.rmtree(hostile)


@pytest.mark.slow
def test_samples_side_by_side(opened):
    page = opened("run=first&tab=samples")
    page.get_by_text("first writes at 50").wait_for()
    page.get_by_text("first writes at 100").wait_for()
    page.get_by_role("checkbox", name="second").check()
    page.get_by_text("second writes at 100").wait_for()
    page.get_by_label("Through training").fill("0")
    page.get_by_text("second writes at 50").wait_for()
    assert page.get_by_text("first writes at 50").is_visible()


def test_a_chat_streams(opened):
    page = opened("run=first&tab=chat")
    page.get_by_role("option", name="tiny").wait_for(state="attached")
    page.get_by_label("Message").fill("Hi")
    page.keyboard.press("Enter")
    page.get_by_text("Hello you").wait_for()
    assert page.get_by_role("button", name="Send").is_enabled()
    page.locator("#mode").select_option("text")
    page.get_by_label("Message").fill("ROMEO:")
    with page.expect_request("**/v1/completions?*") as asked:
        page.get_by_role("button", name="Send").click()
    assert asked.value.post_data_json["prompt"] == "ROMEO:"
    page.locator(".is-assistant", has_text="Hello you").nth(1).wait_for()


@pytest.mark.slow
def test_a_chat_with_a_model_that_the_page_loads(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(model_server, "serve_command", stand_in)
    run_dir = make_run(tmp_path, "slow")
    for step in ("9", "100"):
        (run_dir / "checkpoints" / step).mkdir(parents=True)
    with served(page_app(tmp_path)) as url:
        page = opened("run=slow&tab=chat", url=url)
        options = page.locator("#model option")
        options.nth(1).wait_for(state="attached")
        assert options.all_inner_texts() == ["slow at step 100", "slow at step 9"]
        page.get_by_label("Message").fill("Hi")
        page.keyboard.press("Enter")
        page.get_by_text("Loading the model ...").wait_for()
        page.get_by_text("Hello from slow").wait_for()
        assert page.get_by_role("button", name="Send").is_enabled()
        page.close()


@pytest.mark.slow
def test_what_the_dry_run_refuses_is_one_line(opened, site):
    page = opened("tab=estimate")
    page.get_by_label("Overrides").fill("oops")
    page.get_by_role("button", name="Estimate", exact=True).click()
    page.get_by_text("override 'oops' must be key.path=value").wait_for()
    assert page.get_by_text("jaxtrain train --config quickstart oops").is_visible()


def test_a_comparison_in_one_file_works_without_a_server(opened, site, tmp_path, capsys):
    folder, _ = site
    hostile = make_run(tmp_path, "<b>x", steps=80)
    (hostile / "env.json").write_text(json.dumps({"device_kind": "</script><!--<b>"}))
    out = tmp_path / "out" / "compare.html"
    runs = [str(folder / "first"), str(folder / "second"), str(hostile)]
    assert compare_main([*runs, "--html", str(out)]) == 0
    assert "compare.html" in capsys.readouterr().out
    page = opened(url=out.as_uri())
    assert points(page, "train-loss") == 24 and drawn(page, "train-loss") > 0.001
    page.get_by_role("row", name="optim.learning_rate").wait_for()
    assert page.get_by_role("rowheader", name="<b>x", exact=True).is_visible()
    assert page.get_by_role("cell", name="1 x </script><!--<b>").is_visible()


@pytest.mark.slow
def test_a_long_run_is_drawn_at_once(opened, site):
    folder, _ = site
    run = make_run(folder, "long", steps=10)
    write_rows(run, train_rows(60_000, every=1))
    try:
        page = opened("run=long")
        page.locator('figure[data-measure="train-loss"] .plot[data-points="60000"]').wait_for()
        assert drawn(page, "train-loss") > 0.001
    finally:
        shutil.rmtree(run)
