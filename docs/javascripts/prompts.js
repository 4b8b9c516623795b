// What is copied from a Python session is its code, without prompts and outputs.

function withoutPrompts(text) {
  const lines = text.split("\n").filter((line) => /^(>>>|\.\.\.)( |$)/.test(line));
  return lines.map((line) => line.slice(4)).join("\n");
}

function isSession(text) {
  return text.trimStart().startsWith(">>> ");
}

document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("pre > code")) {
    if (isSession(code.textContent)) {
      // The copy button takes this text instead of that on the page.
      code.parentElement.setAttribute("data-copy", withoutPrompts(code.textContent));
    }
  }
});

document.addEventListener("copy", (event) => {
  const selected = document.getSelection().toString();
  if (isSession(selected)) {
    event.clipboardData.setData("text/plain", withoutPrompts(selected));
    event.preventDefault();
  }
});
