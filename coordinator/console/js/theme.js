// The theme button: follow the system, or always dark, or always light; kept in localStorage.

const KEY = "baton.theme";
const NEXT = { system: "dark", dark: "light", light: "system" };
const GLYPH = { system: "◐", dark: "☾", light: "☀" };

function chosen() {
  return document.documentElement.dataset.theme ?? "system";
}

function show(button) {
  const theme = chosen();
  button.textContent = GLYPH[theme];
  const label = `Theme: ${theme}. Change to ${NEXT[theme]}`;
  button.setAttribute("aria-label", label);
  button.title = `${label} (t)`;
}

export function startTheme(button) {
  const change = () => {
    const theme = NEXT[chosen()];
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // Storage can be forbidden; the choice then lasts as long as the page.
    }
    show(button);
  };
  button.addEventListener("click", change);
  show(button);
  return change;
}
