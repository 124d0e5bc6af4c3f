// Where keys are asked for: the way to the sign-in, and out again.

const SIGN_IN = "/ui/signin.html";

/** The hash names the view to come back to. `asked` says that some coordinator wants a key: the sign-in then never goes back by itself. */
export function goToSignIn() {
  if (location.pathname !== SIGN_IN) location.assign(`${SIGN_IN}?asked${location.hash}`);
}

/** Shows the button that signs out, to those who have signed in. */
export async function startSession(button) {
  const response = await fetch("/session", { cache: "no-store" }).catch(() => null);
  const who = response?.ok ? await response.json().catch(() => null) : null;
  if (!who?.key) return;
  button.hidden = false;
  button.title = `Signed in with the key of ${who.key}`;
  button.addEventListener("click", async () => {
    await fetch("/session", { method: "DELETE" }).catch(() => {});
    goToSignIn();
  });
}
