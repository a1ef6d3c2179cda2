document.addEventListener("DOMContentLoaded", () => renderMathInElement(document.body));
