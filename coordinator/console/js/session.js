// Where keys are asked for: the way to the sign-in, and out again.

import { toast } from "./copy.js";

const SIGN_IN = "/ui/signin.html";
/** The session had ended before. */
const UNAUTHORIZED = 401;

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
    const ended = await fetch("/session", { method: "DELETE" }).catch(() => null);
    if (ended?.ok || ended?.status === UNAUTHORIZED) goToSignIn();
    else toast("You are still signed in: the coordinator did not end the session. Try again.");
  });
}
