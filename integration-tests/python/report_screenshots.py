"""Takes pictures of a report: narrow and wide, light and dark, and its pages on A4.

    python3 integration-tests/python/report_screenshots.py DIR/report.html FOLDER [--full]

Writes NAME-narrow-light.png, NAME-narrow-dark.png, NAME-wide-light.png, NAME-wide-dark.png and NAME-paper.pdf, and
NAME-paper-1.png .. when pdftoppm (Debian: poppler-utils) is there. NAME is that of the report's folder. Without --full a
picture shows the first screens only, and two pages are drawn. It needs playwright and a Chromium (scripts/get-chromium).
"""

import argparse
import shutil
import subprocess
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"narrow": (400, 1600), "wide": (1280, 1600)}
PAPER_DPI = 80
PAGES_SHOWN = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--full", action="store_true", help="whole pages")
    args = parser.parse_args()
    report = args.report.resolve(strict=True)
    name = report.parent.name if report.name == "report.html" else report.stem
    args.folder.mkdir(parents=True, exist_ok=True)
    found = subprocess.run([ROOT / "scripts" / "get-chromium"], capture_output=True, text=True, check=True)
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root, and the page is ours.
        browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
        for size, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(report.as_uri())
                picture = args.folder / f"{name}-{size}-{scheme}.png"
                page.screenshot(path=picture, full_page=args.full)
                print(picture)
                page.close()
        page = browser.new_page()
        page.goto(report.as_uri())
        paper = args.folder / f"{name}-paper.pdf"
        page.pdf(path=paper, prefer_css_page_size=True, print_background=True)
        print(paper)
        browser.close()
    if shutil.which("pdftoppm"):
        last = [] if args.full else ["-l", str(PAGES_SHOWN)]
        command = ["pdftoppm", "-png", "-r", str(PAPER_DPI), *last, paper, args.folder / f"{name}-paper"]
        subprocess.run(command, check=True)
    else:
        print("pdftoppm is not installed: the PDF is not drawn as pictures")


if __name__ == "__main__":
    main()
