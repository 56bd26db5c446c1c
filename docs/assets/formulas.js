// Typeset the formulas of a page, which pymdownx.arithmatex has marked, by the bundled KaTeX.
// The text of a formula is \(...\) within a sentence and \[...\] in a paragraph of its own.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  katex.render(text.slice(2, -2), element, {
    displayMode: text.startsWith("\\["),
    throwOnError: false, // a test has typeset every formula; in an unforeseen case its text is shown in red
  });
}
