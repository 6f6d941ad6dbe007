/* Light, dark, or as the system has it. Loaded before anything is painted. The choice is all the page ever stores. */
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
  // The next of the three; what a click on the switch does.
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
