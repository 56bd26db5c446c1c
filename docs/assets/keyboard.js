// Let wide tables, formulas, pictures and cells of notebooks be scrolled by keyboard: the theme does so for code only.
const wide = [
  ".md-typeset__scrollwrap",
  "div.arithmatex",
  ".highlight-ipynb",
  ".jp-OutputArea-output",
  '.md-typeset p:has(> img[src*="pictures/"])',
].join();
function reach() {
  for (const element of document.querySelectorAll(wide)) {
    const scrolls = element.scrollWidth > element.clientWidth;
    element.toggleAttribute("data-scrolls", scrolls);
    if (scrolls) element.tabIndex = 0;
    else element.removeAttribute("tabindex");
  }
}
addEventListener("load", reach); // the theme puts tables into their wrappers before
addEventListener("resize", reach);

// On a narrow screen the navigation is a drawer: it is open while one of its links has the focus.
const drawer = document.getElementById("__drawer");
const navigation = document.querySelector(".md-sidebar--primary");
addEventListener("focusin", event => {
  if (drawer && navigation && matchMedia("(max-width: 76.234375em)").matches) {
    drawer.checked = navigation.contains(event.target);
  }
});
