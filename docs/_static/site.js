// Whatever scrolls by itself can be reached, and scrolled, by keys.
document.addEventListener("DOMContentLoaded", () => {
  for (const part of document.querySelectorAll("article pre, article p:has(> img), .table-wrapper")) {
    if (part.scrollWidth > part.clientWidth) {
      part.tabIndex = 0;
      part.setAttribute("role", "region");
      part.setAttribute("aria-label", { PRE: "code or output", P: "picture" }[part.tagName] || "table");
    }
  }
});
