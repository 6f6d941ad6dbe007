/* Light, dark, or the system's theme. Loaded before the first paint. The page stores nothing but this choice. */
(() => {
  const ORDER = ["auto", "light", "dark"];
  const KEY = "operations-theme";
  const root = document.documentElement;

  function stored() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  }

  function set(theme) {
    root.dataset.theme = ORDER.includes(theme) ? theme : "auto";
  }

  set(stored());
  // A click on the switch selects the next of the three.
  globalThis.nextTheme = () => {
    const next = ORDER[(ORDER.indexOf(root.dataset.theme) + 1) % ORDER.length];
    set(next);
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // Kept for this visit only.
    }
    return next;
  };
})();
