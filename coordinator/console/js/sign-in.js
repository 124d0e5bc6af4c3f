// The sign-in: sends the key once, then goes back to the view that asked for it. The key is kept nowhere on this side.

import { failureOf } from "./api.js";

const PATH = "/session";
const says = document.getElementById("says");
const field = document.getElementById("key");

/** The hash is the view of the console that was open. */
const back = () => location.replace(`/ui/${location.hash}`);

async function signIn(key) {
  let response;
  try {
    response = await fetch(PATH, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ key }),
    });
  } catch {
    says.textContent = "The coordinator could not be reached.";
    return;
  }
  if (response.ok) back();
  else says.textContent = (await failureOf(response, PATH)).message;
}

document.getElementById("sign-in").addEventListener("submit", async (event) => {
  event.preventDefault();
  says.textContent = "";
  await signIn(field.value.trim());
  field.select();
});

// Nobody has to sign in twice, or where no key is asked for. Behind a balancer another coordinator may answer than the one that asked.
if (location.search !== "?asked") {
  fetch(PATH, { cache: "no-store" })
    .then((response) => response.ok && back())
    .catch(() => {});
}
