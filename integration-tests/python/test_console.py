"""The web console in a real browser, by clicks and by keys: against `baton up` (BATON_CONSOLE_URL) or a mock."""

import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

URL = os.environ.get("BATON_CONSOLE_URL", "").rstrip("/").removesuffix("/ui")
if not URL:
    # Who names a cluster wants it tested; without one the console is tested where a browser can be driven.
    pytest.importorskip("playwright.sync_api", reason="pip install playwright (no browser download needed)")
from playwright.sync_api import expect, sync_playwright  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RECORDS = 10_000
# Rows that fit on the screen, the spare ones above and below, and the head.
ROWS_MAX = 80
# Asks the mock to hold or do what a real cluster does not on demand; conftest.py leaves these out of a run with a cluster.
mock_only = pytest.mark.mock
LIMIT_MS = 20_000
# A folder for pictures of every view; without it none is taken.
PICTURES = os.environ.get("BATON_CONSOLE_PICTURES")


class Server:
    def __init__(self, url):
        self.url = url

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path, body=None):
        request = urllib.request.Request(
            self.url + path, json.dumps(body or {}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()


@pytest.fixture(scope="session")
def server():
    if not URL:
        from console.mock_server import serve

        mock = serve(records=RECORDS)
        yield Server(f"http://127.0.0.1:{mock.server_address[1]}")
        mock.shutdown()
        return
    real = Server(URL)
    model = real.get("/v1/models")["data"][0]["id"]
    for n in range(4):
        messages = [{"role": "user", "content": f"Count to {n + 3}."}]
        real.post(
            "/v1/chat/completions",
            {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0, "stream": True},
        )
    yield real


@pytest.fixture(scope="session")
def browser():
    found = subprocess.run([ROOT / "scripts" / "get-chromium"], capture_output=True, text=True, check=False)
    if found.returncode == 4 and not URL:
        pytest.skip(found.stderr)
    assert found.returncode == 0, found.stderr
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root, and the pages are ours.
        chromium = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def context(browser, server):
    fresh = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light", accept_downloads=True)
    fresh.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    fresh.set_default_timeout(LIMIT_MS)
    expect.set_options(timeout=LIMIT_MS)
    yield fresh
    fresh.close()


@pytest.fixture
def page(context, server):
    """A page that must stay without errors (a breach of the content policy is one) and ask nobody but the server."""
    opened = context.new_page()
    faults, strangers = [], []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    opened.on(
        "request",
        lambda request: strangers.append(request.url) if not request.url.startswith((server.url, "blob:")) else None,
    )
    yield opened
    assert not strangers
    # What the network did is the page's to report in words, and tests look at those.
    assert not [fault for fault in faults if "Failed to load resource" not in fault and "ERR_" not in fault]


@pytest.fixture
def at(page, server):
    def go(hash_link):
        # From another document, so that it is a deep link and not a step inside the page.
        page.goto("about:blank")
        page.goto(f"{server.url}/ui/{hash_link}")
        return page

    return go


def rows(page):
    return page.locator(".grid-body .grid-row:visible")


def chosen_id(page):
    return page.locator(".grid-body .grid-row[aria-selected=true]:visible a").inner_text()


def some_request(server):
    """An ended request with a first token and a good while after it, by the id that links carry."""
    records = server.get("/admin/requests?limit=200&outcome=ok")["records"]
    return next(record for record in records if record["ttft_ms"] is not None and record["e2e_ms"] > 2 * record["ttft_ms"])


def copied(page):
    return page.evaluate("navigator.clipboard.readText()")


# Elements that stick out of the page to the left or right, and boxes that scroll sideways. Code may scroll inside its own box.
STICKS_OUT = """() => {
  const width = document.documentElement.clientWidth;
  const found = [];
  for (const element of [document.documentElement, ...document.querySelectorAll("body, body *")]) {
    if (element.ownerSVGElement || !element.checkVisibility() || element.closest(".visually-hidden, .skip")) continue;
    const name = [element.tagName.toLowerCase(), ...element.classList].join(".") + (element.id && `#${element.id}`);
    const isScrolling = /auto|scroll/.test(getComputedStyle(element).overflowX) || element === document.documentElement;
    const beyond = element.scrollWidth - element.clientWidth;
    if (isScrolling && beyond > 0 && !element.matches("pre")) found.push(`${name} scrolls sideways by ${beyond} px`);
    const box = element.getBoundingClientRect();
    if (box.width > 0 && !element.closest("pre") && (box.left < -0.5 || box.right > width + 0.5))
      found.push(`${name} reaches from ${box.left} to ${box.right} of ${width} px`);
  }
  return found.slice(0, 12);
}"""


def assert_nothing_sticks_out(page):
    """The page settles within a moment: charts are drawn again when their boxes have got their size."""
    deadline = time.monotonic() + 3
    while (found := page.evaluate(STICKS_OUT)) and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert not found, "\n".join(found)


# ---- cluster ----------------------------------------------------------------------------------------------------


def test_the_map_has_every_node_and_every_pair(at, server):
    page = at("")
    cluster = server.get("/admin/cluster")
    for node in cluster["nodes"]:
        card = page.locator(f'.node-card[data-node="{node["name"]}"]')
        expect(card).to_be_visible()
        expect(card.locator("header")).to_contain_text(node["state"])
        expect(card.locator(".block-bar")).to_have_attribute("aria-label", re.compile("free"))
        expect(card.locator('[data-line="lease"]')).to_have_text(re.compile(r"\d.* m?s"))
        row = card.locator("xpath=ancestor::section[@data-role]")
        assert row.get_attribute("data-role") == node["role"]
    expect(page.locator('.node-card[data-node="coordinator"]')).to_contain_text(cluster["coordinator"]["model"])
    expect(page.locator(".edges .edge")).to_have_count(len(cluster["pairs"]))
    for pair in cluster["pairs"]:
        expect(page.locator(f'.edge[data-prefill="{pair["prefill"]}"][data-decode="{pair["decode"]}"]')).to_have_count(
            1
        )
    assert page.title().startswith("Cluster")


def test_the_rates_of_the_last_hour_survive_a_reload(at, server):
    page = at("#/cluster")
    for _ in range(2):
        expect(page.locator(".rate")).to_have_count(5)
        some = re.compile(r"n = [\d,]*[1-9]\d* request")
        expect(page.locator('.rate[data-rate="requests"] .rate-hour')).to_contain_text(some)
        expect(page.locator('.rate[data-rate="ttft"] .rate-hour')).to_contain_text(re.compile(r"p50 .*s · p99 .*s, n ="))
        expect(page.locator('.rate[data-rate="tokens"] .step-line').first).to_be_attached()
        page.reload()
    assert server.get("/admin/rates")["slot_s"] == 30
    page.locator('.rate[data-rate="itl"]').get_by_role("button", name="PromQL").click()
    expect(page.locator("#toast")).to_have_text("PromQL copied")
    assert "baton_itl_seconds_bucket" in copied(page)


@mock_only
def test_a_slot_without_a_request_is_a_gap_and_not_zero(at):
    page = at("#/cluster")
    expect(page.locator('.rate[data-rate="requests"] .step-line')).to_have_count(2)
    expect(page.locator('.rate[data-rate="ttft"] .step-line')).to_have_count(4)
    page.locator('.rate[data-rate="ttft"] svg').hover(position={"x": 60, "y": 40})
    expect(page.locator('.rate[data-rate="ttft"] .rate-read')).to_contain_text("n =")


@mock_only
def test_every_coordinator_and_every_transport_is_named(at, server):
    page = at("#/cluster")
    expect(page.locator('[data-node="coordinator"] dl')).to_contain_text("2 in etcd, nodes connected to 3")
    expect(page.locator('[data-coordinator="coordinator-1"]')).to_contain_text("Registered in etcd")
    expect(page.locator('[data-coordinator=""]')).to_contain_text("1 more")
    for pair in server.get("/admin/cluster")["pairs"]:
        row = page.locator("main table tbody tr", has_text=f"{pair['prefill']} → {pair['decode']}")
        expect(row.locator("td").nth(1)).to_have_text(pair["transport"] or "–")
        label = page.locator(f'.edge[data-prefill="{pair["prefill"]}"][data-decode="{pair["decode"]}"] text')
        expect(label).to_contain_text(pair["transport"] or "not usable")
    # The cards of a row share its whole width.
    row, cards = page.locator(".map-row-prefill .map-cards").bounding_box(), page.locator(".map-row-prefill .node-card")
    first, last = cards.first.bounding_box(), cards.last.bounding_box()
    assert first["x"] == pytest.approx(row["x"], abs=1)
    assert last["x"] + last["width"] == pytest.approx(row["x"] + row["width"], abs=1)


def test_an_order_waits_for_a_confirmation(at, server):
    page = at("#/cluster")
    orders = []
    page.on("request", lambda request: orders.append(request.url) if request.method == "POST" else None)
    node = next(node for node in server.get("/admin/cluster")["nodes"] if node["state"] == "ready")
    button = page.locator(f'.node-card[data-node="{node["name"]}"]').get_by_role("button", name="Drain")
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Nothing new goes to {node['name']} from now on.")
    expect(dialog).to_contain_text("Then its process exits with status 0.")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    # The keys of the page do nothing behind it.
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.set_viewport_size({"width": 400, "height": 700})
    box = dialog.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 400
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(button).to_be_focused()
    assert page.url.endswith("#/cluster")
    assert not orders


@mock_only
def test_a_node_is_drained_and_changes_its_role(at):
    page = at("#/cluster")
    card = page.locator('.node-card[data-node="prefill-1"]')
    card.get_by_role("button", name="Drain").click()
    with page.expect_request(re.compile("/admin/nodes/prefill-1/drain$")) as sent:
        page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    assert sent.value.method == "POST"
    expect(page.locator("#toast")).to_have_text("prefill-1 is draining")
    expect(card.locator("header")).to_contain_text("draining")
    expect(card.get_by_role("button", name=re.compile("^Drain"))).to_be_disabled()
    expect(card.locator("header")).to_contain_text("ready")
    card.get_by_role("button", name="Change role").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("joins again as a decode node")
    dialog.locator("select").select_option("co-located")
    expect(dialog).to_contain_text("joins again as a co-located node")
    with page.expect_request(re.compile("/admin/nodes/prefill-1/role/co-located$")):
        dialog.get_by_role("button", name="Make it a co-located node").click()
    expect(page.locator("#toast")).to_contain_text("comes back as a co-located node")
    # Its process was started as a prefill node and can be nothing else.
    role = page.locator('.node-card[data-node="prefill-0"]').get_by_role("button", name="Change role")
    expect(role).to_be_disabled()
    expect(role).to_have_attribute("title", re.compile("has this role only"))


@mock_only
def test_the_last_decode_node_is_drained_only_when_that_is_said_twice(at):
    page = at("#/cluster")
    page.locator('.node-card[data-node="decode-0"]').get_by_role("button", name="Drain").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Drain").click()
    expect(dialog.get_by_role("alert")).to_contain_text("the only node that decodes")
    with page.expect_request(re.compile(r"/admin/nodes/decode-0/drain\?force=true$")):
        dialog.get_by_role("button", name="Drain all the same").click()
    expect(dialog).to_have_count(0)


@mock_only
def test_a_busy_pair_is_thicker_and_a_broken_one_is_named(at):
    page = at("#/cluster")
    busy = page.locator(".edge.is-busy").first
    expect(busy).to_be_attached()
    width = "element => Number(element.querySelector('path').getAttribute('stroke-width'))"
    assert busy.evaluate(width) > page.locator(".edge.is-unusable").first.evaluate(width)
    expect(page.locator("table")).to_contain_text("handshake refused")


def test_a_node_leads_to_its_requests(at, server):
    page = at("#/cluster")
    name = server.get("/admin/cluster")["nodes"][0]["name"]
    page.locator(f'.node-card[data-node="{name}"] .node-name').click()
    expect(page).to_have_url(re.compile(re.escape(f"#/requests?node={name}")))
    expect(page.locator("#filter-node")).to_have_value(name)


# ---- requests ---------------------------------------------------------------------------------------------------


def test_filters_are_in_the_address_and_survive_a_reload(at, server):
    page = at("#/requests")
    expect(rows(page).first).to_be_visible()
    lane = server.get("/admin/requests?limit=1")["records"][0]["lane"]
    page.locator("#filter-lane").select_option(lane)
    page.locator("#filter-slower").fill("0.5")
    page.locator("#slowest").click()
    expect(page).to_have_url(re.compile(r"slower_than_ms=0\.5"))
    page.reload()
    expect(page.locator("#filter-lane")).to_have_value(lane)
    expect(page.locator("#filter-slower")).to_have_value("0.5")
    expect(page.locator("#slowest")).to_have_attribute("aria-pressed", "true")
    expect(rows(page).first).to_be_visible()
    lanes = set(page.locator(".grid-body .grid-row:visible > :nth-child(3)").all_inner_texts())
    assert lanes == {lane}
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#filter-lane")).to_have_value("")


def test_a_filter_that_is_being_typed_ends_with_its_view(at):
    page = at("#/requests")
    expect(rows(page).first).to_be_visible()
    page.evaluate(
        """async () => {
          const field = document.querySelector("#filter-slower");
          field.value = "5";
          field.dispatchEvent(new Event("input"));
          location.hash = "#/cluster";
          await new Promise((resolve) => setTimeout(resolve, 600));
        }"""
    )
    expect(page).to_have_url(re.compile("#/cluster$"))


def test_slowest_first_is_the_order_of_the_server(at, server):
    page = at("#/requests?sort=-e2e_ms&outcome=ok")
    expect(rows(page).first).to_be_visible()
    slowest = server.get("/admin/requests?slowest=true&outcome=ok&limit=1")["records"][0]
    expect(page.locator('.grid-body .grid-row[aria-rowindex="2"] a')).to_have_text(slowest["id"])


@mock_only
@pytest.mark.parametrize("name", ["breached", "stalled"])
def test_switches_count_as_the_server_does(at, server, name):
    page = at("#/requests")
    expect(page.locator(".list-says")).to_contain_text("10,000 of 10,000")
    page.locator(f"#filter-{name}").click()
    page.locator("#filter-outcome").select_option("failed")
    page.locator("#filter-outcome").select_option("")
    expect(page).to_have_url(re.compile(f"{name}=true"))
    shown = int(page.locator(".list-says").inner_text().split(" of ")[0].replace(",", ""))
    # The server keeps a few newer and older ones than the page.
    assert abs(shown - len(server.get(f"/admin/requests?limit=1000&{name}=true")["records"])) < 20


def test_a_new_request_appears_by_itself(at, server):
    page = at("#/requests")
    expect(rows(page).first).to_be_visible()
    newest = page.locator('.grid-body .grid-row[aria-rowindex="2"] a')
    before = newest.inner_text()
    model = server.get("/v1/models")["data"][0]["id"]
    server.post(
        "/v1/chat/completions",
        {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True},
    )
    expect(newest).not_to_have_text(before)


@mock_only
def test_ten_thousand_records_need_few_rows(at, server):
    page = at("#/requests")
    expect(page.locator(".list-says")).to_contain_text("10,000 of 10,000")
    grid = page.get_by_role("grid")
    assert int(grid.get_attribute("aria-rowcount")) == RECORDS + 1
    count = "document.querySelectorAll('.grid-body .grid-row').length"
    assert page.evaluate(count) < ROWS_MAX
    page.locator("#hold").click()
    grid.focus()
    page.keyboard.press("End")
    expect(page.locator(f'.grid-row[aria-rowindex="{RECORDS + 1}"][aria-selected=true]')).to_be_visible()
    page.keyboard.press("Home")
    expect(page.locator('.grid-row[aria-rowindex="2"][aria-selected=true]')).to_be_visible()
    grid.evaluate("element => { element.scrollTop = element.scrollHeight / 2; }")
    expect(page.locator(f'.grid-row[aria-rowindex="{RECORDS // 2}"]')).to_be_visible()
    assert page.evaluate(count) < ROWS_MAX


# ---- one request ------------------------------------------------------------------------------------------------


def test_a_click_opens_the_waterfall_and_the_stages_add_up(at, server):
    wanted = some_request(server)
    page = at("#/requests?sort=-seq&outcome=ok")
    row = rows(page).filter(has_text=wanted["id"])
    if row.count() == 0:
        row = rows(page).first
    row.first.locator("xpath=./*[2]").click()
    expect(page.locator(".waterfall .span-row").first).to_be_visible()
    name = page.locator("h1").inner_text()
    detail = server.get(f"/admin/requests/{name}")
    stages = [stage for stage in detail["stages"] if stage["phase"] == "ttft"]
    expect(page.locator(".ttft-legend li")).to_have_count(len(stages) + 1)
    expect(page.locator(".ttft-sum")).to_contain_text("unattributed")
    assert abs(sum(stage["ms"] for stage in stages) + detail["unattributed_ms"] - detail["ttft_ms"]) < 0.01
    widths = page.locator(".ttft-bar .piece").evaluate_all(
        "pieces => pieces.map(piece => Number(piece.style.flexGrow))"
    )
    assert sum(widths) == pytest.approx(detail["ttft_ms"], abs=0.05)
    trace = server.get(f"/admin/traces/{name}?view=waterfall")
    expect(page.locator(".waterfall .span-row")).to_have_count(len(trace["spans"]))


def test_a_deep_link_opens_by_every_id(at, server):
    record = some_request(server)
    for name in (record["id"], record["response_id"], record["trace_id"], str(record["seq"])):
        page = at(f"#/requests/{name}")
        expect(page.locator("h1")).to_have_text(record["id"])
        expect(page.locator(".waterfall .span-row").first).to_be_visible()
    page.reload()
    expect(page.locator(".waterfall .span-row").first).to_be_visible()


def test_the_pointer_and_grouping_of_the_waterfall(at, server):
    page = at(f"#/requests/{some_request(server)['id']}")
    forward = page.locator(".span-row", has_text="prefill.forward").first
    forward.hover()
    expect(page.locator(".details h2")).to_contain_text("prefill.forward")
    expect(page.locator(".details")).to_contain_text("Attributes")
    page.get_by_label("Group spans").select_option("processes")
    processes = page.locator(".waterfall .process-row")
    expect(processes.first).to_contain_text("coordinator")
    assert processes.count() >= 2
    axis = page.locator(".waterfall .axis text")
    # SVG text has no inner text. The last tick is the longest time: less than half of it is left, and then all again.
    whole = axis.last.text_content()
    page.get_by_role("button", name="To first token").click()
    expect(axis.last).not_to_have_text(whole)
    page.get_by_role("button", name="Whole").click()
    expect(axis.last).to_have_text(whole)


def test_the_attributes_of_a_span_stand_in_two_columns_and_can_be_copied(at, server):
    page = at(f"#/requests/{some_request(server)['id']}")
    page.locator(".waterfall .span-row").first.hover()
    details = page.locator(".details")
    expect(details.locator(".attributes").nth(1)).to_be_visible()
    for part in ("dt", "dd"):
        lefts = details.locator(part).evaluate_all("all => all.map(one => Math.round(one.getBoundingClientRect().left))")
        assert len(lefts) > 5 and len(set(lefts)) == 1, f"{part} at {lefts}"
    assert details.evaluate("pane => pane.scrollWidth - pane.clientWidth") <= 0, "long values wrap"
    details.get_by_role("button", name="Copy all").click()
    expect(page.locator("#toast")).to_have_text("attributes copied")
    attributes = json.loads(copied(page))
    value = details.locator(".attribute", has=page.get_by_text("request.model", exact=True))
    value.get_by_role("button", name="Copy the value").click()
    expect(page.locator("#toast")).to_have_text("value copied")
    assert copied(page) == attributes["gen_ai.request.model"]


@mock_only
def test_a_request_leads_to_its_trace_in_the_viewer(at, server):
    record = some_request(server)
    page = at(f"#/requests/{record['id']}")
    link = page.get_by_role("link", name="Open in trace viewer")
    expect(link).to_have_attribute("href", f"https://jaeger.example/trace/{record['trace_id']}")
    expect(link).to_have_attribute("rel", "noopener noreferrer")


def test_what_can_be_taken_along(at, server):
    record = some_request(server)
    page = at(f"#/requests/{record['id']}")
    expect(page.locator(".waterfall .span-row").first).to_be_visible()
    page.get_by_role("button", name="Copy CLI").click()
    expect(page.locator("#toast")).to_have_text("command copied")
    assert copied(page) == f"baton trace {record['id']}"
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#toast")).to_have_text("link copied")
    assert copied(page) == page.url
    page.get_by_role("button", name="Copy as JSON").click()
    expect(page.locator("#toast")).to_have_text("JSON copied")
    assert json.loads(copied(page))["trace_id"] == record["trace_id"]
    with page.expect_download() as download:
        page.get_by_role("button", name="Download JSON").click()
    assert json.loads(Path(download.value.path()).read_text())["request"]["seq"] == record["seq"]


@mock_only
def test_stalls_retries_and_clocks_are_told(at):
    page = at("#/requests/demo-stalls")
    expect(page.locator(".event-stall")).to_have_count(2)
    expect(page.get_by_text("a chunk of 512 prompt tokens ran in the same step")).to_be_visible()
    at("#/requests/demo-retried")
    expect(page.get_by_role("cell", name="connection lost")).to_be_visible()
    expect(page.get_by_text("Spans of decode-1 are missing: connection refused.")).to_be_visible()
    expect(page.locator(".waterfall .links path").first).to_be_attached()


@mock_only
def test_each_of_several_prompts_is_told(at):
    page = at("#/requests/demo-several-prompts")
    table = page.locator("section", has=page.get_by_role("heading", name="Prompts (3)"))
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("shm-direct")
    expect(rows.nth(1)).to_contain_text("local: transfer failed")
    page = at("#/requests/demo-stalls")
    expect(page.get_by_role("heading", name="Prompts")).to_have_count(0)


@mock_only
def test_a_span_before_its_parent_is_marked(at):
    page = at("#/requests/demo-early-span")
    expect(page.locator(".bar.is-early")).to_have_count(1)
    page.locator(".span-row", has_text="⚠").hover()
    expect(page.locator(".details .warning")).to_contain_text(
        "before its parent prefill; the clocks' error explains at most"
    )


def test_an_unknown_id_is_explained(at):
    page = at("#/requests/never-was-here")
    expect(page.locator(".nothing")).to_contain_text("keeps no request with this id")


@mock_only
def test_markup_from_outside_stays_text(at, server):
    from console.fake_requests import MARKUP

    page = at("#/requests?outcome=kv_transfer_failed&slower_than_ms=1")
    expect(rows(page).filter(has_text="<img")).to_have_count(1)
    rows(page).filter(has_text="<img").click()
    expect(page.locator("h1")).to_have_text(MARKUP)
    expect(page.locator(".because.is-failed")).to_contain_text(MARKUP)
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.hacked") is None
    page.get_by_role("button", name="Copy CLI").click()
    expect(page.locator("#toast")).to_have_text("command copied")
    assert copied(page) == f"baton trace '{MARKUP}'"


@mock_only
def test_an_id_that_begins_like_a_flag_is_none_in_a_command(at, page, server):
    record = some_request(server) | {"id": "--slowest"}
    page.route("**/admin/requests/--slowest", lambda route: route.fulfill(json=record))
    page.route("**/admin/traces/**", lambda route: route.fulfill(status=404, body="not kept"))
    at("#/requests/--slowest")
    page.get_by_role("button", name="Copy CLI").click()
    expect(page.locator("#toast")).to_have_text("command copied")
    assert copied(page) == "baton trace -- --slowest"


@mock_only
def test_an_answer_that_breaks_off_is_told_from_one_that_is_no_json(at, server):
    page = at("#/reports")
    said = page.evaluate(
        """async (module) => {
          const { getJson } = await import(module);
          const failureOf = async (body) => {
            const before = window.fetch;
            window.fetch = async () => new Response(body);
            try {
              return await getJson("/x");
            } catch (problem) {
              return [problem.constructor.name, problem.status];
            } finally {
              window.fetch = before;
            }
          };
          const cut = new ReadableStream({ pull: (controller) => controller.error(new Error("cut")) });
          return [await failureOf(cut), await failureOf("<html>")];
        }""",
        f"{server.url}/ui/js/api.js",
    )
    assert said == [["ApiFailure", None], ["ApiFailure", 200]]


@mock_only
def test_spans_that_could_not_be_read_are_said_for_good(at, page, server):
    page.route("**/admin/traces/**", lambda route: route.fulfill(status=503, body="nobody answered"))
    records = server.get("/admin/requests?limit=200&outcome=ok&lane=interactive")["records"]
    at(f"#/requests/{next(record['id'] for record in records if record['ttft_ms'] is not None)}")
    # The limit is read after the request, and then the page is drawn again.
    expect(page.locator(".ttft-sum")).to_contain_text("limit")
    expect(page.locator("main .warning").filter(has_text="The spans could not be read.")).to_have_count(1)


# ---- latency and KV ---------------------------------------------------------------------------------------------


@mock_only
def test_a_counter_that_was_restarted_counts_from_zero(at, server):
    page = at("#/latency")
    counts = page.evaluate(
        """async (module) => {
          const { since } = await import(module);
          const reading = (...counts) => ({ edges: [1, Infinity], counts, total: counts[0] + counts[1], sum: 0 });
          return [since(reading(7, 9), reading(5, 4)).counts, since(reading(3, 9), reading(5, 4)).counts];
        }""",
        f"{server.url}/ui/js/prometheus.js",
    )
    assert counts == [[2, 5], [3, 9]]


@mock_only
def test_a_minute_has_no_sixtieth_second(at, server):
    page = at("#/latency")
    said = page.evaluate(
        """async (module) => {
          const { ms } = await import(module);
          return [60_000, 119_499, 119_999, 150_000].map(ms);
        }""",
        f"{server.url}/ui/js/format.js",
    )
    assert said == ["1 min 0 s", "1 min 59 s", "2 min 0 s", "2 min 30 s"]


@mock_only
def test_a_quarter_of_an_hour_of_many_pairs_is_drawn(at, server):
    """More points than a call may have arguments."""
    page = at("#/reports")
    said = page.evaluate(
        """async (js) => {
          const { ClusterStore } = await import(`${js}/cluster-store.js`);
          const { mountKv } = await import(`${js}/views/kv.js`);
          const numbers = Array.from({ length: 16 }, (_, n) => n);
          const pairs = numbers.flatMap((prefill) =>
            numbers.map((decode) => ({ prefill, decode, is_usable: true, kv_bytes_total: 0, handoffs_total: 0 })),
          );
          const store = new ClusterStore(new EventTarget());
          for (let at = 0; at < 900; at += 1) store.take({ nodes: [], pairs }, 1e12 + at * 1000);
          const root = document.createElement("div");
          mountKv(root, { query: new URLSearchParams({ minutes: "15" }) }, { cluster: store }).dispose();
          return [...root.querySelectorAll("[data-pair] .figures")].map((figures) => figures.textContent);
        }""",
        f"{server.url}/ui/js",
    )
    assert len(said) == 256 and all("highest second 0 B/s" in words for words in said)


@mock_only
def test_a_node_that_changes_its_role_is_called_by_the_new_one(at, server):
    page = at("#/reports")
    said = page.evaluate(
        """async (js) => {
          const { ClusterStore } = await import(`${js}/cluster-store.js`);
          const { mountKv } = await import(`${js}/views/kv.js`);
          const store = new ClusterStore(new EventTarget());
          const take = (role, at) =>
            store.take({ nodes: [{ name: "prefill-1", role, block_tokens: 16, kv_blocks: { free: 9 } }], pairs: [] }, at);
          take("prefill", 1e12);
          const root = document.createElement("div");
          const view = mountKv(root, { query: new URLSearchParams() }, { cluster: store });
          take("decode", 1e12 + 1000);
          view.dispose();
          const chip = root.querySelector("[data-node] .role-chip");
          return [chip.textContent, chip.className];
        }""",
        f"{server.url}/ui/js",
    )
    assert said == ["decode", "role-chip role-decode"]


def test_histograms_with_limits_counts_and_copies(at, server):
    page = at("#/latency")
    chart = page.locator('.chart[data-metric="baton_ttft_seconds"][data-lane="interactive"]')
    expect(chart.locator(".hist-bar").first).to_be_attached()
    expect(chart.locator(".figures")).to_contain_text(re.compile(r"n = [\d,]+ request"))
    expect(chart.locator(".figures")).to_contain_text("p99")
    expect(chart.locator(".limit text").first).to_contain_text("SLO")
    expect(page.locator('.chart[data-metric="baton_itl_seconds"]').first).to_be_visible()
    chart.get_by_role("button", name="Copy PromQL").click()
    expect(page.locator("#toast")).to_have_text("PromQL copied")
    assert 'baton_ttft_seconds_bucket{lane="interactive"}' in copied(page)
    profiles = server.get("/admin/slo")["profiles"]
    expect(page.locator("main table").first).to_contain_text(next(p["name"] for p in profiles if p["lanes"]))
    page.locator("#latency-window").select_option("5m")
    page.reload()
    expect(page.locator("#latency-window")).to_have_value("5m")


@mock_only
def test_few_samples_are_grey_and_said_to_be_few(at):
    page = at("#/latency")
    few = page.locator('.chart[data-metric="baton_ttft_seconds"][data-lane="batch"]')
    expect(few.locator(".figures .is-few").first).to_be_visible()
    expect(few.locator(".figures")).to_contain_text("fewer than 100 samples")
    many = page.locator('.chart[data-metric="baton_ttft_seconds"][data-lane="interactive"]')
    expect(many.locator(".percentile").first).to_be_attached()
    assert many.locator(".is-few").count() == 0


def test_kv_of_every_node_and_pair(at, server):
    page = at("#/kv")
    cluster = server.get("/admin/cluster")
    for node in cluster["nodes"]:
        chart = page.locator(f'.chart[data-node="{node["name"]}"]')
        expect(chart.locator("polygon").first).to_be_attached()
        expect(chart.locator(".figures")).to_contain_text("held by requests")
    for pair in cluster["pairs"]:
        expect(
            page.locator(f'.chart[data-pair="{pair["prefill"]} → {pair["decode"]}"] polyline').first
        ).to_be_attached()
    first = page.locator(".chart").first
    first.locator("svg").hover()
    expect(first.locator(".readout")).to_contain_text("active")


# ---- playground -------------------------------------------------------------------------------------------------


def ask(page, text, max_tokens):
    expect(page.locator("#chat-model")).to_be_enabled()
    page.locator("#chat-max-tokens").fill(str(max_tokens))
    page.locator("#chat-prompt").fill(text)
    page.locator("#chat-prompt").press("Enter")


def test_chat_shows_timings_and_leads_to_its_waterfall(at):
    page = at("#/playground")
    ask(page, "What is the capital of France?", 12)
    answer = page.locator(".turn-assistant").last
    for name in ("TTFT", "queue", "prefill", "KV transfer", "decode", "tokens/s"):
        expect(answer.locator(".turn-foot")).to_contain_text(name)
    assert answer.locator(".turn-text").inner_text()
    assert answer.locator(".turn-text b").count() == 0, "markup of a model stays text"
    answer.get_by_role("link", name="Waterfall").click()
    expect(page).to_have_url(re.compile("#/requests/chatcmpl-"))
    expect(page.locator(".waterfall .span-row").first).to_be_visible()
    page.go_back()
    expect(page.locator(".turn-assistant")).to_have_count(1)


@mock_only
def test_an_answer_in_markdown_is_laid_out_and_its_markup_stays_text(at):
    page = at("#/playground")
    ask(page, "Answer in Markdown, please.", 400)
    answer = page.locator(".turn-assistant").last
    expect(answer.locator(".turn-foot")).to_contain_text("TTFT")
    text = answer.locator(".turn-text")
    expect(text.locator("h3")).to_have_text("A lighthouse")
    expect(text.locator("strong")).to_have_text("a lamp")
    expect(text.locator("> p em")).to_have_text("a keeper")
    expect(text.locator("p code")).to_have_text("light()")
    expect(text.locator("> ol > li")).to_have_count(2)
    expect(text.locator("> ol > li > ul > li")).to_have_count(2)
    expect(text.locator("pre code")).to_contain_text('return "**not bold**" * seconds')
    expect(text.locator("p").nth(0)).to_contain_text("snake_case_name stays, and so does 2 * 3 * 4.")
    expect(text.locator("a")).to_have_count(1)
    expect(text.locator("a")).to_have_attribute("href", "https://example.com/lighthouse?a=1&b=2")
    expect(text).to_contain_text("[this](javascript:alert)")
    expect(text).to_contain_text("<img src=x")
    assert text.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None
    page.set_viewport_size({"width": 400, "height": 800})
    assert_nothing_sticks_out(page)


@mock_only
def test_an_answer_that_comes_in_pieces_looks_as_if_it_had_come_at_once(at, server):
    from console.mock_server import MARKDOWN

    page = at("#/playground")
    texts = [
        MARKDOWN,
        "- a\n\n- b\n\n  more of b\n\nend\n\n2. two\n3. three\n   1. deep\n",
        "**bold *it* more** ***both*** __x__ *open **and\n\n~~~\nnever closed\n# no heading\n",
        "para\n# heading #\n- item\nlazy\n```\ncode\n```\n``a`b`` [x](http://h/y) [z](data:text/html,q) \\*no\\* `",
        "*" * 300 + "a" + "_" * 300 + "[" * 300 + "`" * 301 + "\n" + "> " * 50 + "\n" + "  - x\n" * 40,
    ]
    different = page.evaluate(
        """async ([module, texts]) => {
          const { Markdown } = await import(module);
          const shown = (cuts) => {
            const element = document.createElement("div");
            const view = new Markdown(element);
            for (const text of cuts) view.show(text);
            return element.innerHTML;
          };
          return texts.filter((text) => {
            const pieces = Array.from(text, (_, at) => text.slice(0, at + 1));
            return shown(pieces) !== shown([text]);
          });
        }""",
        [f"{server.url}/ui/js/markdown.js", texts],
    )
    assert different == []


def test_an_answer_can_be_stopped(at):
    page = at("#/playground")
    # Greedy, so that it is the same long answer each time: a sampled one may be over before the click.
    page.locator("#chat-temperature").fill("0")
    ask(page, "Tell me a very long story about a lighthouse.", 900)
    answer = page.locator(".turn-assistant").last
    expect(answer.locator(".turn-text")).not_to_be_empty()
    page.locator("#chat-stop").click()
    expect(answer.locator(".turn-foot")).to_contain_text("stopped by you")
    expect(page.locator("#chat-send")).to_be_enabled()


def test_a_refusal_is_shown_in_words(at):
    page = at("#/playground")
    page.locator("#chat-temperature").fill("9")
    ask(page, "Hello", 4)
    expect(page.locator(".turn-assistant .is-failed")).to_contain_text("temperature")


# ---- everything -------------------------------------------------------------------------------------------------


def test_the_whole_way_without_a_mouse(at):
    page = at("")
    expect(page.locator(".node-card").first).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(rows(page).first).to_be_visible()
    page.keyboard.press("Space")
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("k")
    page.keyboard.press("j")
    wanted = chosen_id(page)
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(wanted)
    expect(page.locator(".span-row.is-chosen")).to_have_count(1)
    first = page.locator(".details h2").inner_text()
    page.keyboard.press("j")
    expect(page.locator(".details h2")).not_to_have_text(first)
    page.keyboard.press("Escape")
    expect(rows(page).first).to_be_visible()
    assert chosen_id(page) == wanted, "coming back, the row is still the chosen one"
    page.keyboard.press("/")
    page.keyboard.type(wanted)
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(wanted)
    for key, name in (("l", "Latency"), ("k", "KV"), ("c", "Cluster"), ("p", "Playground")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        expect(page.locator("#nav [aria-current]")).to_have_text(name)
    expect(page.locator("#chat-prompt")).to_be_focused()


def test_a_column_is_sorted_without_a_mouse(at):
    page = at("#/requests")
    expect(rows(page).first).to_be_visible()
    page.locator(".grid").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator('.grid-head [aria-sort="ascending"]')).to_have_attribute("data-key", "received")


def test_dark_and_light(at, page):
    background = "getComputedStyle(document.body).backgroundColor"
    at("")
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    assert dark != light
    page.emulate_media(color_scheme="light")
    expect(page.locator("#theme")).to_have_attribute("aria-label", re.compile("system"))
    page.locator("#theme").click()
    assert page.evaluate(background) == dark
    page.reload()
    assert page.evaluate(background) == dark, "the choice is kept"
    page.keyboard.press("t")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) == light


# What says that a view is there, whole.
READY = {
    "cluster": [".node-card:visible", ".rate .step-line", ".edges .edge"],
    "requests": [".grid-body .grid-row:visible"],
    "latency": [".hist-bar", "main table"],
    "kv": [".chart polygon"],
    "playground": ["#chat-prompt", "#chat-model:enabled"],
    "reports": [".reports > *"],
    "request": [".span-row", ".details .attribute", ".ttft-legend"],
}


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [1600, 1000, 400])
@pytest.mark.parametrize("view", READY)
def test_nothing_sticks_out_of_any_view(at, page, server, view, width, scheme):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    at(f"#/requests/{some_request(server)['id']}" if view == "request" else f"#/{view}")
    for selector in READY[view]:
        expect(page.locator(selector).first).to_be_attached()
    assert_nothing_sticks_out(page)
    if PICTURES:
        # Playwright makes the folder.
        page.screenshot(path=Path(PICTURES) / f"{view}-{width}-{scheme}.png")


@mock_only
@pytest.mark.parametrize("name", ["demo-stalls", "demo-retried", "demo-several-prompts"])
def test_the_tables_of_a_request_are_lists_on_a_narrow_page(at, page, name):
    page.set_viewport_size({"width": 400, "height": 900})
    at(f"#/requests/{name}")
    expect(page.locator(".span-row").first).to_be_attached()
    expect(page.locator("main table thead").first).to_be_hidden()
    cell = page.locator("main table td:visible").first
    expect(cell).to_have_css("display", "grid")
    assert cell.get_attribute("data-label"), "the heading that it stands behind"
    assert_nothing_sticks_out(page)


@mock_only
def test_a_coordinator_that_goes_and_comes_back(at, server):
    page = at("#/requests")
    expect(page.locator("#live")).to_have_text("live")
    expect(rows(page).first).to_be_visible()
    server.post("/mock/away")
    try:
        expect(page.locator("#banner")).to_contain_text("The coordinator is away. What you see is of")
        expect(page.locator("#banner")).to_contain_text("Next try in")
        assert rows(page).count() > 0, "what was read stays readable"
        expect(page.get_by_role("button", name="Try now")).to_be_visible()
    finally:
        server.post("/mock/back")
    # On a slow machine the page may have tried by itself meanwhile, and the button is gone from sight.
    page.locator("#banner button", has_text="Try now").dispatch_event("click")
    expect(page.locator("#live")).to_have_text("live")
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator(".list-notice")).to_contain_text("The connection came back")


@mock_only
def test_a_slow_reader_reads_the_list_again(at, page, server):
    at("#/requests")
    expect(page.locator(".list-says")).to_contain_text("10,000 of 10,000")
    with page.expect_request(re.compile("/admin/requests")):
        server.post("/mock/lagged")
    expect(page.locator(".list-notice")).to_contain_text("too slow for 321 events")


@mock_only
def test_reports_are_listed_and_shown_in_a_frame_that_runs_nothing(context, server):
    # Not the fixture `page`: that the browser blocks the report's script is an error there.
    page = context.new_page()
    page.goto(f"{server.url}/ui/#/cluster")
    expect(page.locator("#nav [aria-current]")).to_have_text("Cluster")
    page.keyboard.press("g")
    page.keyboard.press("o")
    expect(page.locator("#nav [aria-current]")).to_have_text("Reports")
    page.get_by_role("link", name="a <b>report</b>").click()
    expect(page.frame_locator("iframe.report-frame").locator("p")).to_have_text("figures")
    assert page.frames[1].title() == "r", "its script did not run"
