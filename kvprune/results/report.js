// Buttons that copy the commands, and folded parts that open for print. Without this script the page is complete.

const status = document.getElementById("copied");

/** Puts text on the clipboard; where the browser does not allow that, it is selected, to be copied by hand. */
async function copy(block, button) {
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(block.textContent);
  } catch {
    getSelection().selectAllChildren(block);
    said = "Selected: press Ctrl+C";
  }
  button.textContent = said;
  status.textContent = said;
  setTimeout(() => {
    button.textContent = "Copy";
    status.textContent = "";
  }, 3000);
}

for (const block of document.querySelectorAll(".command pre")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy: ${block.getAttribute("aria-label")}`);
  button.onclick = () => copy(block, button);
  block.after(button);
}

const opened = [];
window.addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not([open])")) {
    part.open = true;
    opened.push(part);
  }
});
window.addEventListener("afterprint", () => {
  for (const part of opened.splice(0)) part.open = false;
});
