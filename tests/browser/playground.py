"""What somebody at the page sees and does, by the names that assistive technology knows."""

from __future__ import annotations

from collections.abc import Collection

from playwright.sync_api import Locator, Page, expect

MODELS = "Models"


class Playground:
    """An open page.

    complaints: what the browser said of it so far; those that a test expects it takes out.
    """

    def __init__(self, page: Page, complaints: list[str]) -> None:
        self.page = page
        self.complaints = complaints
        self.prompt = page.get_by_role("textbox", name="Prompt")
        self.ask_button = page.get_by_role("button", name="Ask", exact=True)
        self.stop_button = page.get_by_role("button", name="Stop", exact=True)
        self.tooltip = page.get_by_role("tooltip")

    def model(self, name: str) -> Locator:
        """The box that chooses it."""
        return self.page.get_by_role("checkbox", name=name, exact=True)

    def choose(self, names: Collection[str]) -> None:
        """These models and no others."""
        expect(self.model(next(iter(names)))).to_be_attached()
        boxes = self.page.get_by_role("list", name=MODELS).get_by_role("checkbox")
        for box in boxes.all():
            box.uncheck()
        for name in names:
            self.model(name).check()

    def set(self, field: str, value: str) -> None:
        """A field of the settings."""
        self.open_details("Settings")
        self.page.get_by_label(field, exact=True).fill(value)

    def send_as_plain_text(self) -> None:
        self.open_details("Settings")
        self.page.get_by_role("radio", name="plain text to go on with").check()

    def open_details(self, summary: str) -> None:
        details = self.page.locator("details", has=self.page.get_by_text(summary, exact=True))
        if details.get_attribute("open") is None:
            details.locator("summary").click()

    def ask(self, prompt: str) -> None:
        self.prompt.fill(prompt)
        self.ask_button.click()

    def answer(self, model: str) -> Locator:
        """Its column."""
        return self.page.get_by_role("article", name=model, exact=True)

    def text(self, model: str) -> str:
        """What it has said."""
        return self.tokens_of(model).text_content() or ""

    def tokens_of(self, model: str) -> Locator:
        return self.page.get_by_role("group", name=f"Tokens of {model}", exact=True)

    def expect_state(self, model: str, text: str) -> None:
        """Wait until its status line has this in it."""
        expect(self.answer(model).get_by_role("status")).to_contain_text(text)

    def figures(self, model: str) -> list[str]:
        """First token, tokens per second, tokens."""
        return self.answer(model).get_by_role("definition").all_text_contents()
