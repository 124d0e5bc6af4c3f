// Sets the chosen theme before the first paint; a classic script, because modules run after it.
(() => {
  try {
    const chosen = localStorage.getItem("baton.theme");
    if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage can be forbidden; the system's theme is then used.
  }
})();
